"""A resumed run goes on as if it had never stopped, also from a checkpoint between two generations."""

import pytest
import torch

from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.checkpoints import CheckpointError, read_manifest
from agent_r1_trl.trainers.saving import IN_FLIGHT, PLACE, ROLLOUT_STATE, check_same_run
from tests.trainers.helpers import make_trainer, moving_reference

matrix = pytest.mark.matrix


@pytest.mark.parametrize("kind", [MultiTurnPPOTrainer, pytest.param(MultiTurnGRPOTrainer, marks=matrix)])
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


def check_resumed(checkpoint, folder, *, saved=(), given=(), **options):
    """Compare a run with a checkpoint; both may be changed."""
    trainer = make_trainer(folder, **(SAVED | options))
    vars(trainer.args).update(given)
    check_same_run(checkpoint, read_manifest(checkpoint)["run"] | dict(saved), trainer)


@pytest.mark.parametrize(("name", "value"), OTHER_SETTINGS.items(), ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_a_run_whose_place_is_counted_in_another_setting_is_refused_by_name(saved_run, tmp_path, name, value, step):
    said = rf"saved with {name}={SAVED[name]} and cannot go on with {name}={value}, .*Start it with"
    with pytest.raises(CheckpointError, match=said) as caught:
        check_resumed(saved_run / f"checkpoint-{step}", tmp_path, **{name: value})
    assert "resume_from_checkpoint=" in str(caught.value) and "resume_without: [rollout]" in str(caught.value)
    check_resumed(saved_run / f"checkpoint-{step}", tmp_path, **{name: value}, resume_without=["rollout"])


@pytest.mark.parametrize(
    "option",
    [
        {"update_layout": "shared"},
        {"max_tokens_per_micro_batch": 300},
        {"beta": 0.1},
        {"loss_unit": "token"},
        {"top_k": 20},
    ],
    ids=str,
)
def test_a_rollout_in_flight_is_not_trained_on_in_another_form(saved_run, tmp_path, option):
    ((name, value),) = option.items()
    with pytest.raises(CheckpointError, match=f"cannot go on with {name}={value}, .* and the rollout in flight do"):
        check_resumed(saved_run / "checkpoint-1", tmp_path, given=option)
    check_resumed(saved_run / "checkpoint-2", tmp_path, given=option)  # the next rollout has the new form


def test_a_rollout_in_flight_holds_no_tokens_of_a_new_loss_term(saved_run, tmp_path):
    trainer = make_trainer(tmp_path, **SAVED, loss_term=f"{__name__}:over_observations")
    saved = read_manifest(saved_run / "checkpoint-1")["run"]
    with pytest.raises(CheckpointError, match=r"extra_tokens=\[\] and cannot go on with extra_tokens=\['loss_term'\]"):
        check_same_run(saved_run / "checkpoint-1", saved, trainer)
    del saved["extra_tokens"]  # of an older version, which did not tell
    check_same_run(saved_run / "checkpoint-1", saved, trainer)


def over_observations(inputs, log_probs, mask):
    return log_probs.sum()


over_observations.extra_tokens = lambda inputs: inputs["completion_mask"].bool()


def test_another_number_of_processes_is_refused(saved_run, tmp_path):
    with pytest.raises(CheckpointError, match=r"saved with processes=2 and cannot go on with processes=1, which"):
        check_resumed(saved_run / "checkpoint-2", tmp_path, saved={"processes": 2})


@pytest.mark.parametrize("version", [None, 2])
def test_another_format_is_refused_and_nothing_that_it_does_not_hold_is_named(saved_run, tmp_path, version):
    """Older manifests hold the format, the place and the form of the rollout in no way."""
    checkpoint = saved_run / "checkpoint-2"
    saved = read_manifest(checkpoint)["run"]
    names = ("checkpoint_format", "processes", "is_in_flight", *PLACE, *IN_FLIGHT)
    saved = {name: value for name, value in saved.items() if name not in names} | {"checkpoint_format": version}
    with pytest.raises(
        CheckpointError, match=r"another version of agent-r1-trl .*resume_without: \[rollout\]"
    ) as caught:
        check_same_run(checkpoint, saved, make_trainer(tmp_path, **SAVED))
    assert "Start it with" not in str(caught.value)
    check_same_run(checkpoint, saved, make_trainer(tmp_path, **SAVED, resume_without=["rollout"]))


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
