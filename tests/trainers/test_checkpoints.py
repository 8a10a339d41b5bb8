"""A resumed run goes on as if it had never stopped, also from a checkpoint between two generations."""

import pytest
import torch

from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.saving import ROLLOUT_STATE, RolloutCheckpoint
from tests.trainers.helpers import PlainEnv, make_args, make_trainer, moving_reference

matrix = pytest.mark.matrix
EXACT = ("loss", "grad_norm", "reward", "completions/mean_length", "entropy")
"""Logged per step; rollout metrics only where a rollout was made."""


def history(trainer):
    return {
        entry["step"]: {name: entry[name] for name in EXACT if name in entry}
        for entry in trainer.state.log_history
        if "loss" in entry
    }


@pytest.mark.parametrize(("generator", "options"), [
    ("scripted", {"save_steps": 2}),
    ("transformers", {"save_steps": 3, "steps_per_generation": 2}),
    pytest.param("scripted", {"save_steps": 3, "steps_per_generation": 2, "num_iterations": 2}, marks=matrix),
    pytest.param("scripted", {"save_steps": 2, "gradient_accumulation_steps": 2}, marks=matrix),
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


@pytest.mark.parametrize("kind", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])
def test_a_resumed_run_goes_on_with_the_reference_that_had_moved(tmp_path, kind, caplog):
    options = moving_reference(tmp_path / "policy") | {"trainer": kind, "num_generations": 4}
    common = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4, **options}
    straight, resumed = make_trainer(tmp_path, **common), make_trainer(tmp_path, **common)
    start = [parameter.clone() for parameter in straight.ref_model.parameters()]
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    kl, continued = ([entry["kl"] for entry in trainer.state.log_history if "kl" in entry][-2:]
                     for trainer in (straight, resumed))  # fmt: skip
    assert continued == pytest.approx(kl, rel=1e-6) and min(kl) > 0
    references = [list(trainer.ref_model.parameters()) for trainer in (straight, resumed)]
    assert all(map(torch.equal, *references)) and not all(map(torch.equal, start, references[0]))
    assert "reference of the KL term" not in caplog.text


@pytest.mark.parametrize("moves", [True, False])
def test_a_reference_that_a_checkpoint_lacks_or_a_run_leaves_is_warned_of_by_name(tmp_path, moves, caplog):
    moving = moving_reference(tmp_path / "policy")
    by_moves = {True: moving, False: {name: moving[name] for name in ("model", "beta")}}
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **by_moves[not moves]).train()
    trainer = make_trainer(tmp_path, max_steps=2, **by_moves[moves])
    trainer.train(resume_from_checkpoint=True)
    assert "reference/model.safetensors" in caplog.text and "sync_ref_model is " + str(moves).lower() in caplog.text


def test_a_checkpoint_between_two_generations_holds_the_rollout(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, steps_per_generation=2)
    trainer.train()
    between = torch.load(tmp_path / "checkpoint-1" / ROLLOUT_STATE.format(rank=0), weights_only=True)
    after = torch.load(tmp_path / "checkpoint-2" / ROLLOUT_STATE.format(rank=0), weights_only=True)
    assert len(between["buffered_inputs"]) == 2
    assert after["buffered_inputs"] is None
    assert (between["step"], after["step"]) == (1, 2)


class Accelerator:
    """What the checkpoint asks of accelerate, on one of several ranks."""

    def __init__(self, rank=0, num_processes=1):
        self.process_index, self.num_processes, self.device = rank, num_processes, torch.device("cpu", rank)


def checkpoint_of(folder, rank=0, num_processes=1, **options):
    return RolloutCheckpoint(make_args(folder, **options), Accelerator(rank, num_processes))


def test_a_rank_on_a_cpu_reads_its_rollout(tmp_path):
    tensor = torch.arange(3)
    place = {"rank": 1, "num_processes": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    checkpoint = checkpoint_of(tmp_path, **place)
    checkpoint.save(tmp_path, 5, [{"ids": tensor}])
    step, buffered_inputs = checkpoint.load(tmp_path, 3)
    assert step == 5 and torch.equal(buffered_inputs[0]["ids"], tensor)


def test_the_checkpoint_of_another_trainer_says_how_many_steps_were_made(tmp_path):
    assert checkpoint_of(tmp_path, gradient_accumulation_steps=2).load(tmp_path, 3) == (6, None)


OTHER_SETTINGS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_generations": 2,
    "num_iterations": 2,
}
SAVED = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2,
    "num_generations": 4, "num_iterations": 1, "max_completion_length": 300, "max_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """The folder of a run with checkpoints between two rollouts (1) and after one (2)."""
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(folder, save_strategy="steps", save_steps=1, **(SAVED | {"max_steps": 2})).train()
    return folder


@pytest.mark.parametrize("option", [
    *({name: value} for name, value in OTHER_SETTINGS.items()),
    {"update_layout": "shared"}, {"beta": 0.1}, {"use_vllm": True}, {"loss_unit": "token"},
], ids=str)  # fmt: skip
def test_a_run_with_another_setting_is_refused_by_name(saved_run, tmp_path, option):
    ((name, value),) = option.items()
    checkpoint = checkpoint_of(tmp_path, **(SAVED | option))
    with pytest.raises(
        ValueError, match=rf"saved with {name}=.* cannot go on with {name}={value}, .*Start it"
    ) as caught:
        checkpoint.load(saved_run / "checkpoint-1", 1)
    assert "resume_from_checkpoint=" in str(caught.value) and "resume_without: [rollout]" in str(caught.value)
    if name in OTHER_SETTINGS:  # which its place in the data is counted in
        with pytest.raises(ValueError, match=f"saved with {name}={SAVED[name]} and cannot go on"):
            checkpoint.load(saved_run / "checkpoint-2", 2)
    else:
        assert checkpoint.load(saved_run / "checkpoint-2", 2) == (2, None), "after a rollout the new one holds"


@pytest.mark.parametrize("processes", [(2, 1), (1, 2)], ids=str)
def test_another_number_of_processes_is_refused_by_every_rank(tmp_path, processes):
    saved, resumed = processes
    for rank in range(saved):
        checkpoint_of(tmp_path, rank, saved).save(tmp_path, 1, None)
    for rank in range(resumed):
        with pytest.raises(ValueError, match=f"processes={saved} and cannot go on with processes={resumed}"):
            checkpoint_of(tmp_path, rank, resumed).load(tmp_path, 1)


def test_a_missing_or_damaged_file_is_named_with_the_fix(tmp_path):
    for rank in range(2):
        checkpoint_of(tmp_path, rank, 2).save(tmp_path, 1, None)
    path = tmp_path / ROLLOUT_STATE.format(rank=1)
    whole = path.read_bytes()
    for torn in (whole[: len(whole) // 2], b"", b"text"):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match=r"rollout_state_rank1.pt is damaged .* Resume from an earlier"):
            checkpoint_of(tmp_path, 1, 2).load(tmp_path, 1)
    path.unlink()
    with pytest.raises(ValueError, match=r"rollout_state_rank1.pt is missing. Resume from an earlier"):
        checkpoint_of(tmp_path, 1, 2).load(tmp_path, 1)


@pytest.mark.parametrize("name", [None, "steps_per_generation", *(pytest.param(name, marks=matrix) for name in (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations"
))])  # fmt: skip
def test_without_its_rollout_a_run_goes_on_with_a_new_one(saved_run, tmp_path, name):
    """The fix of the refusals; the place in the data stays whole."""
    checkpoint = saved_run / "checkpoint-1"
    options = SAVED | {"resume_without": ["rollout"]} | ({name: OTHER_SETTINGS[name]} if name else {})
    trainer = make_trainer(tmp_path, **options)
    expected = [[row["id"] for row in batch] for batch in trainer.get_train_dataloader()]  # of the first epoch
    met, roll_out = [], trainer.rollouts.generate

    def watched(rows, model, position):
        met.append((position.micro_step, [row["id"] for row in rows]))
        return roll_out(rows, model, position)

    trainer.rollouts.generate = watched
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 4
    per_rollout = trainer.args.steps_per_generation * trainer.num_iterations
    assert [step % per_rollout for step, _ in met[1:]] == [0] * (len(met) - 1)
    assert all(rows == expected[step] for step, rows in met if step < len(expected))
