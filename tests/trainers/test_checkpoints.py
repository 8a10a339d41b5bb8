"""A resumed run goes on as if it had never stopped, also from a checkpoint between two generations."""

import pytest
import torch

from agent_r1_trl.trainers.resume import ROLLOUT_STATE, load_rollout_state, save_rollout_state
from tests.trainers.helpers import PlainEnv, make_trainer

EXACT = ("loss", "grad_norm", "reward", "completions/mean_length", "entropy")
"""Logged per step; rollout metrics only where a rollout was made."""


def history(trainer):
    return {
        entry["step"]: {name: entry[name] for name in EXACT if name in entry}
        for entry in trainer.state.log_history
        if "loss" in entry
    }


@pytest.mark.parametrize("generator", ["transformers", "scripted"])
@pytest.mark.parametrize("options", [
    {"save_steps": 2},
    {"save_steps": 3, "steps_per_generation": 2},
    {"save_steps": 3, "steps_per_generation": 2, "num_iterations": 2},
    {"save_steps": 2, "gradient_accumulation_steps": 2},
], ids=str)  # fmt: skip
def test_a_resumed_run_continues_exactly(tmp_path, generator, options):
    sampled = {"script": None, "env": PlainEnv, "max_completion_length": 12}
    common = {
        "max_steps": 6, "save_strategy": "steps", "max_completion_length": 300, "per_device_train_batch_size": 4,
        **(sampled if generator == "transformers" else {}), **options,
    }  # fmt: skip
    straight = make_trainer(tmp_path, **common)
    straight.train()
    expected = history(straight)
    assert len({values["grad_norm"] for values in expected.values()}) > 3
    stop = options["save_steps"]
    resumed = make_trainer(tmp_path, **common)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    continued = history(resumed)
    for step in range(stop + 1, 7):
        assert continued[step] == pytest.approx(expected[step], abs=1e-6, rel=1e-5), step


def test_a_checkpoint_between_two_generations_holds_the_rollout(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, steps_per_generation=2)
    trainer.train()
    between = torch.load(tmp_path / "checkpoint-1" / ROLLOUT_STATE.format(rank=0), weights_only=True)
    after = torch.load(tmp_path / "checkpoint-2" / ROLLOUT_STATE.format(rank=0), weights_only=True)
    assert len(between["buffered_inputs"]) == 2
    assert after["buffered_inputs"] is None
    assert (between["step"], after["step"]) == (1, 2)


def test_a_rank_on_a_cpu_reads_its_rollout(tmp_path):
    tensor = torch.arange(3)
    save_rollout_state(tmp_path, 1, step=5, buffered_inputs=[{"ids": tensor}])
    state = load_rollout_state(tmp_path, 1, torch.device("cpu", 0))
    assert state["step"] == 5
    assert torch.equal(state["buffered_inputs"][0]["ids"], tensor)
    assert load_rollout_state(tmp_path, 0, torch.device("cpu", 0)) is None
