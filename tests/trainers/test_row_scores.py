"""Old and reference log-probs and values of a row are those of a plain forward pass of it, in every layout."""

import copy

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from agent_r1_trl.critic.attach import critic_parameters
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.update import layout as layout_module
from agent_r1_trl.update.rows import trained_rows
from tests.effort import nightly
from tests.trainers.helpers import make_trainer, scored_batch
from tests.trainers.test_rows import three_turns

LAYOUTS = {
    "padded": {},
    "packed": {"update_layout": "packed"},
    "shared": {"update_layout": "shared"},
    "packed by tokens": {"update_layout": "packed", "max_tokens_per_micro_batch": 700},
    "shared by tokens": {"update_layout": "shared", "max_tokens_per_micro_batch": 700},
}
WINDOW = {"context.policy": "window", "context.turns": 1, "max_turns": 4, "script": three_turns}
CRITICS = {
    "head": {"critic": "head"},
    "adapter": {"critic": "adapter", "peft_config": LoraConfig(r=4, target_modules="all-linear")},
    "model": {"critic": "model"},
}


def make_gpt2(tokenizer):
    """A policy whose positions are learned: a row that is counted from a padded column is another function."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 1024, "vocab_size": len(tokenizer)}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.1)
    return model


def make(tmp_path, make_model=make_policy, **options):
    make_model(make_tokenizer("qwen3")).save_pretrained(tmp_path / "policy")
    trainer = make_trainer(
        tmp_path, model=str(tmp_path / "policy"), per_device_train_batch_size=4, steps_per_generation=2,
        gradient_accumulation_steps=1, num_generations=4, **(WINDOW | options),
    )  # fmt: skip
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and ("lora_" in name or name in critic_parameters(trainer.model)):
                parameter.normal_(0, 0.2)
    return trainer


def rows_of(trainer):
    held = scored_batch(trainer)
    rows = [row for item in trainer.last_trajectories for row in trained_rows(item)]
    assert len(rows) == len(held["completion_ids"]) > len(trainer.last_trajectories)
    return rows, held


def assert_scored(held, name, rows, expected):
    for number, row in enumerate(rows):
        mask = torch.tensor(row.action_mask).bool()
        found = held[name][number, : len(mask)][mask]
        torch.testing.assert_close(found, expected(row)[mask], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def plain_log_probs(model, row):
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    scores = model(ids).logits.log_softmax(dim=-1)[0, :-1].gather(1, ids[0, 1:, None])
    return scores[len(row.prompt_ids) - 1 :, 0]


FEW = ("padded", "shared by tokens")
OTHERS = tuple(name for name in LAYOUTS if name not in FEW)
FIRST = [("head", "padded"), ("model", "shared by tokens"), ("adapter", "packed")]
REST = [("model", "padded"), ("adapter", "shared"), ("head", "shared by tokens"), ("model", "packed by tokens")]
BOTH = [*FIRST, *nightly(*REST)]
"""Critics and layouts."""


MODELS_AND_LAYOUTS = [
    *((make_policy, layout) for layout in FEW),
    (make_gpt2, "padded"),
    *nightly(*((make_policy, layout) for layout in OTHERS), (make_gpt2, "shared by tokens")),
]


@pytest.mark.parametrize(("make_model", "layout"), MODELS_AND_LAYOUTS)
def test_old_and_reference_log_probs_are_those_of_each_row_alone(tmp_path, make_model, layout):
    trainer = make(tmp_path, make_model, trainer=MultiTurnGRPOTrainer, beta=0.1, **LAYOUTS[layout])
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.1)
    rows, held = rows_of(trainer)
    assert_scored(held, "old_per_token_logps", rows, lambda row: plain_log_probs(trainer.model, row))
    assert_scored(held, "ref_per_token_logps", rows, lambda row: plain_log_probs(trainer.ref_model, row))


@pytest.mark.parametrize(
    ("make_model", "kind", "layout"),
    [
        *((make_policy, *both) for both in FIRST),
        (make_gpt2, "model", "padded"),
        *nightly(*((make_policy, *both) for both in REST), *((make_gpt2, *both) for both in FIRST)),
    ],
)
def test_old_values_are_those_of_each_row_alone(tmp_path, make_model, kind, layout):
    options = {"trainer": MultiTurnPPOTrainer, "bootstrap_truncated": True}
    trainer = make(tmp_path, make_model, **options, **copy.deepcopy(CRITICS[kind]), **LAYOUTS[layout])
    rows, held = rows_of(trainer)

    @torch.no_grad()
    def plain_values(row):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        values = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), values_only=True).state_values
        return values[0, -len(row.completion_ids) - 1 : -1]

    assert held["old_values"][held["value_mask"].bool()].std() > 0.01
    assert_scored(held, "old_values", rows, plain_values)


@pytest.mark.parametrize("max_turns", [3, *nightly(2)])
@pytest.mark.parametrize(("kind", "layout"), BOTH)
def test_a_truncated_trajectory_goes_on_with_the_value_of_the_context_that_was_opened(
    tmp_path, kind, layout, max_turns
):
    options = {"trainer": MultiTurnPPOTrainer, "bootstrap_truncated": True, "max_turns": max_turns}
    trainer = make(tmp_path, **options, **copy.deepcopy(CRITICS[kind]), **LAYOUTS[layout])
    score, found = trainer._old_values, []
    trainer._old_values = lambda *args: found.append(score(*args)) or found[0]
    scored_batch(trainer)
    bootstrap = found[0][1]
    num_truncated = 0
    for index, item in enumerate(trainer.last_trajectories):
        if not item.stop_reason.is_truncated:
            assert bootstrap[index] == 0
            continue
        num_truncated += 1
        last, context = item.turns[-1], item.open_context
        sampled = item.completion_ids[last.start : last.end]
        kept = item.prompt_ids + sampled
        assert context[: len(kept)] == kept, "the last turn stays"
        ids = torch.tensor([context])
        with torch.no_grad():
            values = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), values_only=True).state_values
        torch.testing.assert_close(bootstrap[index], values[0, -1], atol=2e-5, rtol=1e-4)
    assert num_truncated > 1


@pytest.mark.parametrize("layout", ["shared", *nightly("packed")])
def test_no_forward_pass_holds_more_tokens_than_the_limit_unless_a_row_does(tmp_path, monkeypatch, layout):
    """Those that score, those of the critic, and those of the update."""
    sizes, pack = [], layout_module.pack

    def note(*args, **kwargs):
        batch = pack(*args, **kwargs)
        sizes.append(batch.input_ids.shape[1])
        return batch

    monkeypatch.setattr(layout_module, "pack", note)
    options = {"update_layout": layout, "max_tokens_per_micro_batch": 700, "beta": 0.1}
    make(tmp_path, trainer=MultiTurnPPOTrainer, **options, **CRITICS["model"]).train()
    assert len(sizes) > 8 and max(sizes) <= 700
