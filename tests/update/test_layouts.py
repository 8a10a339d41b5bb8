"""TRL's loss types x layouts of the update: the gradient of `padded`, or a refusal by name whose fix works."""

import inspect
import re

import pytest
import torch
from trl import GRPOTrainer

from agent_r1_trl.trainers import MultiTurnGRPOConfig, inherited_settings
from agent_r1_trl.update.entries import MICRO_BATCHES
from agent_r1_trl.update.layout import REGROUPING_LAYOUTS, UPDATE_LAYOUTS, UpdateLayout
from tests.effort import short
from tests.trainers.helpers import (
    loss_and_gradients,
    make_args,
    make_trainer,
    move_weights,
    scored_batch,
    step_gradients,
)

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_iterations": 2}
LOSS_TYPES = sorted(set(re.findall(r"['\"](\w+)['\"]", " ".join(
    line for line in inspect.getsource(GRPOTrainer._compute_loss).splitlines() if "self.loss_type" in line
))))  # fmt: skip
OPTIONS = [
    {"beta": 0.1, "use_bias_correction_kl": True},
    {"delta": 1.02},
    {"importance_sampling_level": "sequence", "loss_type": "luspo"},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    {"off_policy_mask_threshold": 0.01},
    {"top_entropy_quantile": 0.5},
    {"entropy_coef": 0.1},
    {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.1},
    {"advantage_estimator": "turn_grpo", "loss_type": "vespo"},
    {"loss_mask": False, "loss_type": "sapo"},
]
SOME = (
    {"loss_type": "dapo"},
    {"beta": 0.1, "use_bias_correction_kl": True},
    {"importance_sampling_level": "sequence", "loss_type": "luspo"},
    {"top_entropy_quantile": 0.5},
    {"advantage_estimator": "turn_grpo", "loss_type": "vespo"},
    {"loss_mask": False, "loss_type": "sapo"},
)
PER_MICRO_BATCH = ("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy")


def test_the_loss_types_of_this_trl_are_known():
    assert tuple(LOSS_TYPES) == inherited_settings.LOSS_TYPES


@pytest.mark.parametrize("options", short([{"loss_type": name} for name in LOSS_TYPES] + OPTIONS, *SOME), ids=str)
def test_every_layout_gives_the_gradient_of_the_padded_one_or_is_refused(tmp_path, options, policy_path):
    options = SMALL | options
    flags = [name for name in PER_MICRO_BATCH if name in options]
    flags += ["loss_type"] if options.get("loss_type") == "bnpo" else []
    refused = REGROUPING_LAYOUTS if flags else ()
    for layout in refused:
        with pytest.raises(ValueError, match=f"update_layout='{layout}' with .*({'|'.join(flags)})="):
            make_args(tmp_path, update_layout=layout, **options)
    layouts = {
        name: make_args(tmp_path, update_layout=name, **options) for name in UPDATE_LAYOUTS if name not in refused
    }
    if flags:
        with pytest.raises(ValueError, match=f"max_tokens_per_micro_batch=150 .*({'|'.join(flags)})="):
            make_args(tmp_path, update_layout="packed", max_tokens_per_micro_batch=150, **options)
    else:  # more micro-batches than micro-steps, and fewer
        for name, limit in (("packed", 150), ("shared", 600)):
            layouts[f"{name}, {limit}"] = make_args(
                tmp_path, update_layout=name, max_tokens_per_micro_batch=limit, **options
            )
    trainer = make_trainer(tmp_path, model=policy_path, **options)
    found = {}
    for name, args in layouts.items():
        use_layout(trainer, args)
        found[name] = step_gradients(trainer)
    expected, buffer = found.pop("padded")
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    assert "packed" in found, "which moves no rows"
    if not flags:
        many, few = ([len(step[MICRO_BATCHES]) for step in found[name][1]] for name in ("packed, 150", "shared, 600"))
        assert sum(many) > len(buffer) > sum(few)
        assert few[-1] == 1, "gradients are reduced in the last micro-step"
    for layout, (gradients, others) in found.items():
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=2e-6, rtol=1e-4, msg=f"{layout} {name}")
        if layout in REGROUPING_LAYOUTS:
            moved = [not torch.equal(a["advantages"], b["advantages"]) for a, b in zip(others, buffer, strict=True)]
            assert any(moved), "rows did change places"


def use_layout(trainer, args):
    """The layout of these arguments, and what else the constructor would set."""
    trainer.layout = UpdateLayout(args)
    models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
    trainer.layout.prepare(*models, has_router_loss=False)
    trainer.entropy_coef, trainer._last_world_entropy = args.entropy_coef, 0.0


@pytest.mark.parametrize("option", [{"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}])
def test_a_regrouping_layout_is_equal_where_a_micro_batch_is_a_step(tmp_path, option):
    layouts = [make_args(tmp_path, update_layout=name, **option) for name in ("padded", *REGROUPING_LAYOUTS)]
    trainer = make_trainer(tmp_path, **option)
    found = []
    for args in layouts:
        use_layout(trainer, args)
        found.append(step_gradients(trainer)[0])
    for name, gradient in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], gradient, atol=2e-6, rtol=1e-4, msg=name)


def test_a_router_loss_is_refused_but_with_padded_rows():
    UpdateLayout(MultiTurnGRPOConfig(**CPU)).prepare(has_router_loss=True)
    for layout in UPDATE_LAYOUTS[1:]:
        with pytest.raises(ValueError, match=rf"update_layout='{layout}'.*router_aux_loss_coef=0.0"):
            UpdateLayout(MultiTurnGRPOConfig(**CPU, update_layout=layout)).prepare(has_router_loss=True)


# -------------------------------------------------------------------- advantages of tokens and of rows


ROWS_AND_TOKENS = [{"loss_type": name} for name in LOSS_TYPES] + [
    {"loss_type": name, "importance_sampling_level": "sequence"} for name in ("grpo", "luspo", "cispo", "sapo", "dapo")
] + [
    {"loss_type": "grpo", "off_policy_mask_threshold": 0.01},
    {"loss_type": "grpo", "top_entropy_quantile": 0.5},
    {"loss_type": "grpo", "delta": 1.02},
]  # fmt: skip


OF_THEM = (
    {"loss_type": "vespo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "off_policy_mask_threshold": 0.01},
)


@pytest.mark.parametrize("options", short(ROWS_AND_TOKENS, *OF_THEM), ids=str)
def test_advantages_of_tokens_train_as_trls_advantages_of_rows(tmp_path, options):
    """Ours are (B, T) with 0 outside the loss, TRL's are (B,); what it makes of their sign must not differ."""
    trainer = make_trainer(tmp_path, num_iterations=2, **options)
    batch = scored_batch(trainer)
    move_weights(trainer.model)
    batch["tool_mask"][:, 0] = 0  # no sign can be read at the first token
    batch["advantages"] = batch["advantages"] * batch["tool_mask"]
    rows = batch["advantages"].gather(1, batch["advantages"].abs().argmax(1, keepdim=True)).squeeze(1)
    for trainer.use_vllm in (False, True):
        trainer.vllm_importance_sampling_correction = trainer.use_vllm
        if trainer.use_vllm:
            batch["importance_sampling_ratio"] = torch.where(batch["tool_mask"].bool(), 0.9, 1.0)
            batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.02
        _, gradients = loss_and_gradients(trainer, batch)
        _, expected = loss_and_gradients(trainer, batch | {"advantages": rows})
        assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-4
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4, msg=name)
