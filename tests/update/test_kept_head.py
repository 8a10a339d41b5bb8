"""Sampling masks: ratios of 1, and gradients of the distribution that was drawn from, in every layout."""

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.generation.base import Generation, SamplingParams, check_generation
from agent_r1_trl.generation.vllm.kept import num_logprobs, read_kept_ids
from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batches import whole_rows
from agent_r1_trl.update.entries import KEPT_IDS, MICRO_BATCHES
from agent_r1_trl.update.kept_head import KeptLogProbs, kept_head
from agent_r1_trl.update.packing import pack
from agent_r1_trl.update.rows import _warn_of_lost_masks
from tests.effort import nightly
from tests.trainers.helpers import loss_and_gradients, make_trainer, scored_batch, step_gradients

ALL_THREE = {"top_p": 0.8, "top_k": 20, "min_p": 0.1}


def again(view):
    return [*view.prompt_messages, {"role": "user", "content": "again"}]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_masked_logits(softcap, has_bias, monkeypatch):
    monkeypatch.setattr("agent_r1_trl.update.kept_head._CHUNK_NUMBERS", 50)  # several chunks
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    bias = torch.randn(30, requires_grad=True) if has_bias else None
    kept = torch.full((7, 5), -1, dtype=torch.int32)
    for row in range(7):
        count = 1 + row % 5
        kept[row, :count] = torch.randperm(30)[:count].int()
    targets = torch.stack([row[torch.randint(1 + index % 5, ())] for index, row in enumerate(kept)]).long()
    temperature, scale = 0.7, 1.5
    found = KeptLogProbs.apply(hidden, weight, bias, targets, kept, temperature, softcap, scale)

    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    is_kept = torch.zeros(7, 30, dtype=torch.bool)
    for row, ids in enumerate(kept):
        is_kept[row, ids[ids >= 0].long()] = True
    log_probs = torch.log_softmax((logits / temperature).masked_fill(~is_kept, -torch.inf), dim=1)
    terms = torch.where(is_kept, log_probs.exp() * log_probs.masked_fill(~is_kept, 0.0), 0.0)
    want = log_probs.gather(1, targets[:, None])[:, 0], -terms.sum(dim=1)
    weights = torch.randn(2, 7)
    leaves = [hidden, weight, *([bias] if has_bias else [])]
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, pair, strict=True)), leaves)
        for pair in (found, want)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_head_that_computes_the_scored_positions_alone_gives_the_same():
    """As TRL's does on a GPU; some of the positions could be any id."""
    from trl.trainer import utils

    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(6, 8), torch.randn(30, 8), torch.tensor([1, 2, 3, 4, 5, 6])
    kept = torch.tensor([[1, 7], [2, -1], [3, 9], [-1, -1], [5, 8], [-1, -1]], dtype=torch.int32)
    is_scored = torch.tensor([True, False, True, True, True, False])
    rest = (1.0, 16, None, 1.0, ("log_probs", "entropy"))
    with kept_head(kept, is_scored):
        whole = utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, *rest)
        part = utils._ChunkedLogProbFunction.apply(hidden[is_scored], weight, None, targets[is_scored], *rest)
    logits = hidden @ weight.t()
    want = [logits[0, 1] - logits[0, [1, 7]].logsumexp(0), logits[2, 3] - logits[2, [3, 9]].logsumexp(0)]
    want += [logits[3, 4] - logits[3].logsumexp(0), logits[4, 5] - logits[4, [5, 8]].logsumexp(0)]
    for one, other in zip(whole[:2], part[:2], strict=True):
        torch.testing.assert_close(one[is_scored], other)
        assert not one[~is_scored].any()
    torch.testing.assert_close(part[0], torch.stack(want))


def test_what_rows_share_is_not_shared_where_they_were_drawn_from_other_ids():
    ids = torch.tensor([[1, 2, 10, 11]] * 3)
    kept = torch.tensor([[[10, 12], [11, 13]], [[10, 12], [11, 14]], [[10, 12], [11, 13]]], dtype=torch.int32)
    batch = pack(ids, torch.ones_like(ids), torch.ones(3, 2), kept, share_prefixes=True)
    assert batch.labels.tolist() == [[10, 11, 11]]
    assert batch.kept_ids.padded().tolist() == [[10, 12], [11, 13], [11, 14]]
    assert batch.layout.copies.tolist() == [0, 1, 0, 2, 0, 1]


def by_hand(trainer, inputs):
    """(R, T) log-probs of completions under the distribution that each was drawn from, with gradients."""
    ids, attention = whole_rows(inputs)
    length = inputs["completion_ids"].shape[1]
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1] / trainer.temperature
    kept = inputs[KEPT_IDS].padded().long()
    size = logits.shape[-1]
    mask = kept.new_zeros(*logits.shape[:-1], size + 1, dtype=torch.bool)  # one more, for what is no id
    mask = mask.scatter(-1, torch.where(kept < 0, size, kept), True)[..., :-1]
    mask |= ~(kept >= 0).any(-1, keepdim=True)  # not sampled: anything
    log_probs = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
    return log_probs.gather(-1, inputs["completion_ids"][..., None])[..., 0]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared", *nightly("grouped")])
@pytest.mark.parametrize("filters", [ALL_THREE, {"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_the_trainers_log_probs_are_the_samplers(tmp_path, layout, filters):
    """And the gradient is that of the distribution with the mask; the ratio without it is far from 1."""
    trainer = make_trainer(
        tmp_path, script=None, update_layout=layout, max_completion_length=24, temperature=0.8, loss_type="dapo",
        importance_sampling_unit=None, **filters,
    )  # fmt: skip
    inputs = scored_batch(trainer)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    sampled = torch.tensor(
        [[*item.logprobs, *[0.0] * (mask.shape[1] - len(item.logprobs))] for item in trainer.last_trajectories],
        device=mask.device,
    )
    with torch.no_grad():
        found = trainer._log_probs(trainer.model, inputs)
        whole = trainer._log_probs(trainer.model, {**inputs, KEPT_IDS: None})
    torch.testing.assert_close(found[mask], sampled[mask], rtol=0, atol=1e-4)
    assert (whole - sampled)[mask].exp().mean() < 0.97, "a mask does something here"
    inputs["advantages"] = torch.randn_like(inputs["advantages"]) * mask
    log_probs = by_hand(trainer, inputs)
    trainer.model.zero_grad()
    (-(inputs["advantages"] * log_probs)[mask].sum() / mask.sum()).backward()
    want = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    _, gradients = loss_and_gradients(trainer, inputs)
    for name, value in want.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=2e-6)


CASES = {
    "reference": {"beta": 0.1, "model": "policy"},
    "several rows": {"context.policy": again},
    "lora": {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), "beta": 0.1},
    "ppo": {"trainer": MultiTurnPPOTrainer, "critic": "head", "num_generations": 1},
}


@pytest.mark.parametrize("layout", ["shared", *nightly("packed", "grouped")])
@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_the_gradients_of_the_padded_one(tmp_path, case, layout, policy_path):
    model = {"model": policy_path} if "model" in CASES[case] else {}

    def gradients(name, **options):
        trainer = make_trainer(
            tmp_path / name, script=None, max_completion_length=20, gradient_accumulation_steps=2,
            per_device_train_batch_size=4, max_turns=2, **{**ALL_THREE, **CASES[case], **options, **model},
        )  # fmt: skip
        found, batches = step_gradients(trainer)
        assert all(KEPT_IDS in one for batch in batches for one in batch.get(MICRO_BATCHES, [batch]))
        return {name: value for name, value in found.items() if value.any()}

    want = gradients("padded")
    found = gradients(
        "other", update_layout=layout, **({"max_tokens_per_micro_batch": 200} if layout == "shared" else {})
    )
    assert found.keys() == want.keys() and want
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=5e-5, atol=2e-6)


def test_a_run_with_masks_learns_and_is_recorded_without_them(tmp_path):
    trainer = make_trainer(
        tmp_path,
        script=None,
        max_completion_length=24,
        max_steps=2,
        record_trajectories="jsonl",
        journal=True,
        **ALL_THREE,
    )
    trainer.train()
    [item, *_] = trainer.last_trajectories
    assert all(turn.kept_ids is not None for turn in item.turns)
    again = Trajectory.from_json(item.to_json())
    assert all(turn.kept_ids is None for turn in again.turns) and again.completion_ids == item.completion_ids


def test_a_replayed_run_trains_on_the_masks_of_its_journal(tmp_path):
    def trained(folder, **options):
        options |= ALL_THREE | {"max_completion_length": 24, "optim": "sgd", "max_steps": 2}
        trainer = make_trainer(tmp_path / folder, script=None, **options)
        trainer.train()
        return trainer.model.state_dict()

    whole = trained("whole", journal=True)
    again = trained("again", journal={"replay": str(tmp_path / "whole")})
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-7)


def test_a_generator_that_does_not_tell_is_warned_of(tmp_path, caplog):
    _warn_of_lost_masks.cache_clear()
    inputs = scored_batch(make_trainer(tmp_path, top_k=5))
    assert not len(inputs[KEPT_IDS].ids) and "does not tell what each token was drawn from" in caplog.text


# -------------------------------------------------------------------- what a back end gives


def test_the_sampled_id_must_be_among_those_that_were_kept():
    def generation(*lists):
        return Generation(token_ids=[3, 5], logprobs=[-1.0, -1.0], stop="stop", kept_ids=KeptIds.of(lists))

    check_generation(generation([3, 4], [5]), 2)
    with pytest.raises(RuntimeError, match=r"sampled token 1 \(id 5\) is not among those it was drawn from"):
        check_generation(generation([3, 4], [6]), 2)
    with pytest.raises(RuntimeError, match="kept_ids of 1"):
        check_generation(generation([3, 4]), 2)
    cut = generation([3, 4], [5])
    cut.cut(1)
    check_generation(cut, 2)
    assert len(cut.kept_ids) == 1 and len(KeptIds.of([])) == 0 and KeptIds.of([]).padded(2).shape == (0, 2)


def test_they_are_read_from_vllms_log_probs():
    params = SamplingParams(top_k=3, top_p=0.9)
    assert num_logprobs(params) == 11 and num_logprobs(SamplingParams()) == 0
    assert num_logprobs(SamplingParams(temperature=0.0, top_k=3)) == 0, "greedy has no mask"
    half = -0.6931471805599453
    kept = read_kept_ids([{7: half, 2: half, 9: -9999.0}, {1: 0.0, 4: float("-inf")}], params)
    assert kept.padded(2).tolist() == [[2, 7], [1, -1]]
    with pytest.raises(RuntimeError, match=r"more ids than the 1 that it names .*0.5000"):
        read_kept_ids([{7: half}], params)
    assert read_kept_ids([{7: half}], SamplingParams()) is None


@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_vllm_needs_a_bound_on_their_number(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}.*Set top_k as well"):
        make_trainer(tmp_path, use_vllm=True, vllm_mode="server", **{name: 0.5})
