"""The layout that `update_layout: auto` chooses, and what it does where the choice does not fit."""

import logging

import pytest

from agent_r1_trl.trainers.config_checks import layout_problem
from agent_r1_trl.update import layout as layout_module
from agent_r1_trl.update import packed_attention
from agent_r1_trl.update.layout import UpdateLayout
from agent_r1_trl.update.packed_attention import PACKED_ATTENTION
from tests.trainers.helpers import make_args, make_trainer
from tests.update.test_packing import make_model


@pytest.fixture
def on_gpu(monkeypatch):
    """The run's device is a GPU; models and rows stay on the CPU."""
    monkeypatch.setattr(layout_module, "is_on_cuda", lambda args: True)


def layout_of(tmp_path, **options):
    args = make_args(tmp_path, **options)
    return UpdateLayout(args, lambda name: layout_problem(args, name))


def test_it_is_the_default_and_on_a_cpu_it_is_padded(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "agent_r1_trl"):
        trainer = make_trainer(tmp_path)
    assert (trainer.args.update_layout, trainer.layout.name) == ("auto", "padded")
    assert "update_layout" not in caplog.text


def test_a_limit_of_tokens_needs_a_packed_layout_on_a_cpu_as_well(tmp_path):
    assert layout_of(tmp_path, max_tokens_per_micro_batch=500).name == "shared"


ACCUMULATES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "shared"),
        (ACCUMULATES, "shared"),
        ({"loss_type": "bnpo", **ACCUMULATES}, "packed"),
        ({"top_entropy_quantile": 0.2, **ACCUMULATES}, "packed"),
        ({"entropy_coef": 0.1, **ACCUMULATES}, "packed"),
        ({"loss_type": "bnpo"}, "shared"),
        ({"pad_to_multiple_of": 8}, "padded"),
        ({"update_layout": "grouped"}, "grouped"),
    ],
)
def test_on_a_gpu_it_is_the_fastest_that_the_other_settings_allow(on_gpu, tmp_path, options, expected):
    assert layout_of(tmp_path, **options).name == expected


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ({}, {}, "shared"),
        ({}, {"has_router_loss": True}, "padded"),
        ({"attn_implementation": "eager"}, {}, "grouped"),
    ],
)
def test_a_model_that_does_not_fit_gets_the_next_one_with_the_reason(
    on_gpu, tmp_path, caplog, model, options, expected
):
    layout = layout_of(tmp_path)
    with caplog.at_level(logging.WARNING, "agent_r1_trl"):
        layout.prepare(make_model("qwen3", **model), **options)
    assert layout.name == expected
    assert layout.is_packed == (expected == "shared")
    assert (f"update_layout: auto takes {expected!r}" in caplog.text) == (expected != "shared")


def test_a_critic_that_does_not_fit_takes_the_policy_along(on_gpu, tmp_path):
    policy, critic = make_model("qwen3"), make_model("qwen3", attn_implementation="eager")
    layout = layout_of(tmp_path)
    layout.prepare(policy)
    assert (layout.name, policy.config._attn_implementation) == ("shared", PACKED_ATTENTION)
    layout.prepare(critic, name="critic_model")
    assert (layout.name, policy.config._attn_implementation) == ("grouped", "sdpa")


def test_a_model_that_cannot_be_tried_is_not_packed(on_gpu, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(layout_module, "is_out_of_reach", lambda base: True)
    layout = layout_of(tmp_path)
    layout.prepare(make_model("qwen3"))
    assert layout.name == "grouped"
    assert "could not be tried in packed rows before the run" in caplog.text


def test_a_layout_that_the_user_has_chosen_is_not_exchanged(on_gpu, tmp_path):
    with pytest.raises(ValueError, match="update_layout: the model has the attention implementation 'eager'"):
        layout_of(tmp_path, update_layout="shared").prepare(make_model("qwen3", attn_implementation="eager"))


def test_a_kernel_without_a_gradient_is_found_before_the_run(on_gpu, tmp_path, monkeypatch, caplog):
    """Hidden states are right, gradients of keys and values are lost."""
    attend = packed_attention._attend_one_by_one

    def forgetful(query, key, value, *others, **options):
        return attend(query, key.detach(), value.detach(), *others, **options)

    monkeypatch.setattr(packed_attention, "_attend_one_by_one", forgetful)
    layout = layout_of(tmp_path)
    layout.prepare(make_model("qwen3"))
    assert layout.name == "grouped"
    assert "computes other gradients in packed rows" in caplog.text
