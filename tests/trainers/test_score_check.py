"""The policy is scored as it was sampled, or the run says why not before its first update."""

import dataclasses
import functools

import peft
import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from agent_r1_trl.generation.local import decoding
from agent_r1_trl.generation.sync import own_log_probs
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import multi_turn
from agent_r1_trl.update import packing
from tests.trainers.helpers import make_trainer
from tests.trainers.test_row_scores import make_gpt2


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.named_parameters()}


def train(tmp_path, **options):
    """One step from samples of the model's own; returns the trainer, and the error that ended it."""
    options = {"script": None, "max_completion_length": 60, "max_tokens_per_turn": 12, "max_turns": 2} | options
    trainer = make_trainer(tmp_path, **options)
    before = weights_of(trainer)
    try:
        trainer.train()
        return trainer, None
    except ValueError as error:
        after = weights_of(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before), "before the first update"
        return trainer, str(error)


class NoisyHead(nn.Linear):
    """Dropout that is neither a module nor a number with a name."""

    def forward(self, hidden):
        return super().forward(nn.functional.dropout(hidden, 0.5, self.training))


def with_noise(tokenizer):
    model = make_policy(tokenizer)
    inner = model.model.layers[0].mlp.up_proj
    noisy = NoisyHead(inner.in_features, inner.out_features, bias=False)
    noisy.weight = inner.weight
    model.model.layers[0].mlp.up_proj = noisy
    return model


def with_training_mode(tokenizer):
    model = make_policy(tokenizer)
    norm = model.model.norm
    norm.register_forward_hook(lambda module, args, output: output * (2.0 if module.training else 1.0))
    return model


class ScaledLogits(Qwen2ForCausalLM):
    """Its logits are no plain product with the head, which is what TRL's fused head computes."""

    @functools.wraps(Qwen2ForCausalLM.forward)
    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits * 1.5
        return output


def with_head_of_its_own(tokenizer):
    plain = make_policy(tokenizer)
    model = ScaledLogits(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("make_model", [make_policy, make_gpt2])
def test_a_model_that_is_scored_right_trains(tmp_path, make_model, layout):
    model = make_model(make_tokenizer("qwen3"))
    trainer, error = train(tmp_path, model=model, update_layout=layout)
    assert error is None and trainer.state.global_step == 1


MODELS = {"dropout": with_noise, "training mode": with_training_mode, "output layer": with_head_of_its_own}


@pytest.mark.parametrize("cause", MODELS)
def test_a_model_that_is_scored_otherwise_is_refused_with_the_cause(tmp_path, cause):
    _, error = train(tmp_path, model=MODELS[cause](make_tokenizer("qwen3")))
    assert f"Cause: {cause}" in error and "score_check: warn" in error


def test_positions_that_count_padding_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_turn, "with_positions", lambda model, trainer: model)
    _, error = train(tmp_path, model=make_gpt2(make_tokenizer("qwen3")))
    assert "Cause: neighbours" in error and "Take another model" in error


def test_a_layout_that_does_not_fit_is_found(tmp_path, monkeypatch):
    right = packing.pack

    def shifted(*args, **options):
        batch = right(*args, **options)
        return dataclasses.replace(batch, position_ids=batch.position_ids * 3)

    monkeypatch.setattr("agent_r1_trl.update.layout.pack", shifted)
    _, error = train(tmp_path, model=make_gpt2(make_tokenizer("qwen3")), update_layout="packed")
    assert "Cause: layout" in error and "update_layout: padded" in error


def test_a_sampler_that_computes_something_else_is_found(tmp_path, monkeypatch):
    forward = decoding.ModelRunner._forward

    def shifted(self, ids, mask, positions, cache, **options):
        return forward(self, ids, mask, positions + 7, cache, **options)

    monkeypatch.setattr(decoding.ModelRunner, "_forward", shifted)
    _, error = train(tmp_path, model=make_gpt2(make_tokenizer("qwen3")))
    assert "transformers generator reports" in error and "generation_batch_rows: 1" in error


def test_warn_goes_on_and_off_does_not_look(tmp_path, caplog):
    make = MODELS["training mode"]
    trainer, error = train(tmp_path, model=make(make_tokenizer("qwen3")), score_check="warn")
    assert error is None and trainer.state.global_step == 1
    assert "Cause: training mode" in caplog.text
    caplog.clear()
    trainer, error = train(tmp_path, model=make(make_tokenizer("qwen3")), score_check="off")
    assert error is None and "Cause" not in caplog.text


def test_noise_that_is_asked_for_is_warned_of_and_draws_nothing_from_the_run(tmp_path, caplog):
    options = {"disable_dropout": False}
    weights = []
    for check in ("error", "off"):
        torch.manual_seed(3)
        trainer, error = train(tmp_path, model=with_noise(make_tokenizer("qwen3")), score_check=check, **options)
        assert error is None
        weights.append(weights_of(trainer))
    assert "The sampler has no such noise" in caplog.text
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


RANDOM_ADAPTERS = {
    "PVERA": lambda: peft.PveraConfig(r=4, target_modules=["q_proj"]),
    "LORA": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], monteclora_config=peft.MontecloraConfig(num_samples=4, sample_scaler=1.0)
    ),
}
"""They draw numbers in training mode, which do not show while the adapter still adds nothing."""


@pytest.mark.parametrize("kind", RANDOM_ADAPTERS)
def test_an_adapter_that_is_random_in_training_is_refused_although_it_adds_nothing_yet(tmp_path, kind):
    _, error = train(tmp_path, model=make_policy(make_tokenizer("qwen3")), peft_config=RANDOM_ADAPTERS[kind]())
    assert f"({kind}) is random in training mode" in error and "peft_config=LoraConfig()" in error


def test_looking_at_an_adapter_moves_neither_its_weights_nor_the_runs_random_numbers(tmp_path):
    found = []
    for check in ("error", "off"):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules="all-linear")
        model = make_policy(make_tokenizer("qwen3"))
        trainer, error = train(tmp_path, model=model, peft_config=config, score_check=check)
        assert error is None
        found.append((weights_of(trainer), torch.rand(3)))
    (before, draws), (after, other_draws) = found
    assert torch.equal(draws, other_draws) and all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
def test_own_log_probs_are_those_of_the_full_logits():
    model = make_policy(make_tokenizer("qwen3"))
    ids = list(range(20, 50))
    expected = (model(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
    found = own_log_probs(model, ids, [3, 4, 29], temperature=0.7)
    wanted = torch.stack([expected[place - 1, ids[place]] for place in (3, 4, 29)])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
