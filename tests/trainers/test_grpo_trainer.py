"""The trainer as a whole: what it logs, what it repeats, and what it leaves behind."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from agent_r1_trl.recording import read_records
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.toys import is_freed
from tests.trainers.helpers import PlainEnv, make_trainer, questions

GLOSSARY = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
OF_HF = {"total_flos", "epoch", "step", "learning_rate", "loss", "grad_norm"}


def test_every_logged_metric_is_in_the_glossary(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=questions(2), per_device_eval_batch_size=8)
    trainer.train()
    trainer.evaluate()
    names = {name.removeprefix("eval_") for entry in trainer.state.log_history for name in entry}
    names = {name for name in names if not name.startswith("train_") and name not in OF_HF}
    names -= {"runtime", "samples_per_second", "steps_per_second"}
    cells = {cell for row in re.findall(r"^\| (.*?) \|", GLOSSARY, re.M) for cell in re.findall(r"`([^`]+)`", row)}
    patterns = [re.sub(r"<\w+>", "[^/]+", cell).replace("*", ".*") for cell in cells]
    shorthand = {"min_", "max_", "/std", "latency_max_s", "clip_ratio/"}  # later cells of a row
    for name in sorted(names):
        explained = any(re.fullmatch(pattern, name) for pattern in patterns)
        explained = explained or any(part in name for part in shorthand)
        assert explained, f"{name} is not explained in docs/metrics.md"


def weights_after(tmp_path, **options):
    trainer = make_trainer(tmp_path, script=None, env=PlainEnv, max_completion_length=10, max_steps=2, **options)
    trainer.train()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_a_run_is_reproducible_and_depends_on_its_seed(tmp_path):
    first, again, other = (weights_after(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_what_is_sampled_does_not_depend_on_how_many_run_at_once(tmp_path):
    rollouts = []
    for rows, concurrency in ((64, 64), (2, 3)):
        trainer = make_trainer(
            tmp_path / str(rows), script=None, env=PlainEnv, max_completion_length=10, generation_batch_rows=rows,
            max_concurrency=concurrency, record_trajectories="jsonl",
        )  # fmt: skip
        trainer.train()
        rollouts.append([item.trajectory.completion_ids for item in read_records(tmp_path / str(rows))])
    assert rollouts[0] == rollouts[1]


@pytest.mark.parametrize(
    "options",
    [
        {"peft_config": LoraConfig(r=2, task_type="CAUSAL_LM"), "update_layout": "shared"},
        {"trainer": MultiTurnPPOTrainer, "num_generations": 1},
    ],
    ids=["grpo with lora", "ppo"],
)
def test_a_dropped_trainer_is_freed_with_its_model(tmp_path, options):
    """Else the next one in a notebook, or in a search for settings, finds no memory."""
    trainer = make_trainer(tmp_path, script=None, max_completion_length=60, **options)
    trainer.train()
    dropped = weakref.ref(trainer), weakref.ref(trainer.model)
    del trainer
    assert all(is_freed(reference, timeout_s=1.5) for reference in dropped)  # an idle worker thread goes on for 2 s


def test_environments_of_a_step_are_gone_once_the_next_one_is_sampled(tmp_path):
    """Without Python's collector, which seldom visits what is old; a sandbox may end with its environment alone."""
    made, alive = weakref.WeakSet(), []

    class Counted(PlainEnv):
        def __init__(self):
            super().__init__()
            made.add(self)

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            alive.append(len(made))

    trainer = make_trainer(tmp_path, env=Counted, callbacks=[Count()], max_steps=3)
    gc.collect()
    others = len(made)  # those that the construction has asked
    gc.disable()
    try:
        trainer.train()
    finally:
        gc.enable()
    assert [number - others for number in alive] == [8, 8, 8]


@pytest.mark.slow
def test_a_compiled_policy_is_sampled_as_it_is(tmp_path):
    """A compiled module hides the names of its weights, and the signature of its forward."""
    found = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer = make_trainer(tmp_path, script=None, max_completion_length=40, max_steps=2, **options)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert hasattr(trainer.model_wrapped, "_orig_mod"), "nothing was compiled"
    assert found[1] == pytest.approx(found[0], abs=1e-6)
