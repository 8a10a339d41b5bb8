"""Features can be left out: without the folder of one the package is imported, trains, and refuses it by name."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from agent_r1_trl import MultiTurnGRPOConfig, RolloutCallback
from agent_r1_trl.features import FEATURES, feature, has_feature
from agent_r1_trl.objects import OwnObjectError
from agent_r1_trl.trainers.rollout_batch import RolloutBatch, ScoredBatch, UpdateBatch
from tests import without_vllm
from tests.effort import short
from tests.trainers.helpers import make_trainer, questions, scored_batch

ROOT = Path(__file__).resolve().parents[2]
ASKS = {
    "sampling": {"sampling": {"filter_groups": "top_p"}},
    "echo_trap": {"echo": True},
    "journal": {"journal": {"replay": "elsewhere"}},
    "reliability": {"failures": {"window": 16}},
    "hub": {"push": {"allow_secrets": ["notes.txt"]}},
    "progress": {"progress": "lines"},
}
"""A setting that only the feature reads."""

SCRIPT = """
import importlib, json, pkgutil, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import agent_r1_trl
assert Path(agent_r1_trl.__file__).is_relative_to(sys.argv[1]), agent_r1_trl.__file__
options, name = json.loads(sys.argv[3]), sys.argv[4]
from agent_r1_trl.features import FEATURES, has_feature
left_out = [f"agent_r1_trl.features.{row}" for row in FEATURES if not has_feature(row)]
left_out += ["agent_r1_trl.features.doors.gym"] if not has_feature("games") else []  # its environments are games
def ignore(broken):
    assert broken.startswith(tuple(left_out)), broken
for module in pkgutil.walk_packages(agent_r1_trl.__path__, "agent_r1_trl.", onerror=ignore):
    if "__main__" not in module.name and "recipes" not in module.name and not module.name.startswith(tuple(left_out)):
        importlib.import_module(module.name)
from agent_r1_trl import MultiTurnGRPOConfig
from agent_r1_trl.cli import find_commands, main
from agent_r1_trl.testing import AddEnv
from tests.trainers.helpers import make_trainer, questions
checkpoints = {"save_strategy": "steps", "save_steps": 1, "eval_dataset": questions(2)}
trainer = make_trainer(Path(sys.argv[2]), env=AddEnv, max_steps=2, **checkpoints)
trainer.train()
trainer.evaluate()
trainer.create_model_card()
again = make_trainer(Path(sys.argv[2]), env=AddEnv, max_steps=3, **checkpoints)
again.train(resume_from_checkpoint=True)
assert again.state.global_step == 3
refused = ""
try:
    make_trainer(Path(sys.argv[2]), env=AddEnv, **options)
except ValueError as error:
    refused = str(error)
print(json.dumps({"refused": refused, "commands": [*find_commands()]}))
"""


def run_without(name, tmp_path):
    """What the package says of itself without the folder of a feature."""
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "recipes"))
    shutil.rmtree(source / "agent_r1_trl" / "features" / name)
    arguments = [str(source), str(tmp_path / "run"), json.dumps(ASKS.get(name, {})), name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT), without_vllm.FOLDER])}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", short(FEATURES, "journal", release=["sampling", "echo_trap"]))
def test_without_its_folder_the_rest_is_imported_and_trains_and_it_is_refused_by_name(tmp_path, name):
    found = run_without(name, tmp_path)
    assert not set(FEATURES[name].commands) & set(found["commands"]) and "train" in found["commands"]
    assert (f"needs the feature '{name}'" in found["refused"]) is (name in ASKS), found["refused"]
    for setting in ASKS.get(name, {}):
        assert found["refused"].startswith(f"{setting}=")


def test_every_folder_has_a_row_and_every_row_a_folder():
    folders = {path.parent.name for path in (ROOT / "src" / "agent_r1_trl" / "features").glob("*/__init__.py")}
    assert folders == set(FEATURES) and all(map(has_feature, FEATURES))


@pytest.mark.parametrize("name", ASKS)
def test_every_setting_of_a_feature_is_a_training_argument_that_the_step_does_not_read(name):
    step = "\n".join(path.read_text() for path in (ROOT / "src" / "agent_r1_trl" / "trainers").glob("multi_turn.py"))
    for setting in FEATURES[name].settings.split():
        assert setting in MultiTurnGRPOConfig.__dataclass_fields__, setting
        assert not re.search(rf"args\.{setting}\b", step), setting


def test_a_feature_that_is_not_there_is_refused_with_what_asked_for_it(monkeypatch):
    monkeypatch.setitem(FEATURES, "flight", FEATURES["games"])
    with pytest.raises(ValueError, match=r"^env=fly: needs the feature 'flight'"):
        feature("flight", "env=fly")


# -------------------------------------------------------------------- a callback of a user's own


class Diary(RolloutCallback):
    name = "diary"

    def __init__(self):
        self.events, self.loaded = [], None

    def attach(self, trainer):
        super().attach(trainer)
        self.events.append("attach")

    def state_dict(self):
        return {"num": len(self.events)}

    def load_state_dict(self, state):
        self.loaded = state


def event_names():
    """Every event of the base class, read from its source."""
    path = ROOT / "src" / "agent_r1_trl" / "trainers" / "callbacks.py"
    kinds = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    (base,) = [kind for kind in kinds if kind.name == "RolloutCallback"]
    return [node.name for node in base.body if isinstance(node, ast.FunctionDef)]


def noted(event):
    base = getattr(RolloutCallback, event)

    def call(self, *arguments, **kwargs):
        self.events.append(event)
        return base(self, *arguments, **kwargs)

    return call


OWN = ("attach", "state_dict", "load_state_dict", "samples_more")
NOT_HERE = {"load", "go_back", "void"}
"""Events of a resumed run, of a rollback, of a rollout that is thrown away."""
STEP = [
    "choose_rows", "replay", "record", "after_rollout", "after_scores", "keep", "rollout_end", "on_values",
    "on_term", "check_loss", "before_step",
]  # fmt: skip


def test_a_users_callback_gets_every_event_in_the_order_of_the_table(tmp_path):
    events = [name for name in event_names() if name not in OWN]
    hooks = {name: noted(name) for name in events}
    diary = type("Notes", (Diary,), hooks | {"extra_loss": lambda self, *rest: None})()
    options = {"eval_dataset": questions(2), "eval_strategy": "steps", "eval_steps": 1, "journal": False}
    trainer = make_trainer(
        tmp_path, callbacks=[diary], max_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1,
        script=None, **options,
    )  # fmt: skip
    trainer.train()
    assert set(events) - set(diary.events) == NOT_HERE
    assert diary.events[0] == "attach" and diary.events[-1] == "end_run"
    assert list(dict.fromkeys(event for event in diary.events if event in STEP)) == STEP
    resumed = make_trainer(tmp_path, callbacks=[later := Diary()], max_steps=1, script=None, **options)
    resumed.train(resume_from_checkpoint=True)
    assert later.loaded["num"] > 1, "its state was in the checkpoint"


def test_what_a_users_callback_does_not_keep_is_not_trained_on(tmp_path):
    class FirstHalf(RolloutCallback):
        def keep(self, batch):
            return torch.arange(len(batch.trajectories)) < len(batch.trajectories) // 2

    trainer = make_trainer(tmp_path, callbacks=[FirstHalf()])
    assert scored_batch(trainer)["is_kept"].tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    "mask", [[True] * 8, torch.ones(8), torch.ones(3, dtype=torch.bool)], ids=["list", "float", "short"]
)
def test_a_mask_of_another_form_is_refused_by_the_name_of_its_callback(tmp_path, mask):
    class Odd(RolloutCallback):
        def keep(self, batch):
            return mask

    with pytest.raises(ValueError, match=r"^Odd\.keep returned .* a bool tensor of shape \(8,\)"):
        scored_batch(make_trainer(tmp_path, callbacks=[Odd()]))


def test_a_state_that_no_resumed_run_could_read_is_refused_when_it_is_saved(tmp_path):
    class Keeps(Diary):
        def state_dict(self):
            return {"self": Path}

    trainer = make_trainer(tmp_path, callbacks=[Keeps()])
    with pytest.raises(ValueError, match=r"^Keeps\.state_dict: .*weights_only"):
        trainer.features.state_dict()


def test_two_callbacks_of_one_name_are_refused(tmp_path):
    class Mine(Diary):
        name = "numbers"

    with pytest.raises(ValueError, match="callbacks: two are named 'numbers'"):
        make_trainer(tmp_path, callbacks=[Mine()])


def test_one_callback_serves_one_trainer_after_another(tmp_path):
    diary = Diary()
    for _ in range(2):
        trainer = make_trainer(tmp_path, callbacks=[diary])
        assert diary.trainer is trainer
    assert diary.events == ["attach"] * 2


def test_the_journal_is_closed_once_nothing_is_sampled_any_more(tmp_path):
    """Another thread writes to it until then."""
    trainer, order = make_trainer(tmp_path, max_steps=1), []
    journal, rollouts = trainer.features["journal"], trainer.rollouts
    for name, owner, method in (("rollouts", rollouts, "end_run"), ("journal", journal, "close_run")):
        monkey = getattr(owner, method)
        setattr(owner, method, lambda name=name, call=monkey: order.append(name) or call())
    trainer.train()
    assert order == ["rollouts", "journal"]


def test_an_evaluation_is_never_thrown_away(tmp_path):
    class Always(RolloutCallback):
        def after_rollout(self, batch):
            return not batch.position.is_training

    trainer = make_trainer(tmp_path, callbacks=[Always()], eval_dataset=questions(2))
    assert "eval_reward" in trainer.evaluate()


def test_a_callback_that_is_added_later_is_attached_and_found_by_its_name(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(diary := Diary())
    assert trainer.features["diary"] is diary and diary.trainer is trainer
    with pytest.raises(KeyError, match=r"'nobody' is none of this run's features: .*'diary'"):
        trainer.features["nobody"]


def test_without_an_environment_rollout_callbacks_are_called(tmp_path):
    turns = []

    class Looks(RolloutCallback):
        def after_rollout(self, batch):
            turns.extend(len(item.turns) for item in batch.trajectories)

    trainer = make_trainer(
        tmp_path,
        env=None,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        script=None,
        callbacks=[Looks()],
        max_completion_length=8,
        max_steps=1,
    )
    trainer.train()
    assert turns == [1] * len(trainer.last_trajectories)


@pytest.mark.parametrize("answer", [7, torch.tensor(True), "no"])
def test_an_answer_that_is_neither_true_nor_false_is_refused(tmp_path, answer):
    class Peek(RolloutCallback):
        def after_rollout(self, batch):
            return answer

    with pytest.raises(ValueError, match=rf"^Peek.after_rollout returned {re.escape(repr(answer))}\. Return True"):
        scored_batch(make_trainer(tmp_path, callbacks=[Peek()]))


def test_rollouts_that_are_thrown_away_again_and_again_are_said(tmp_path, caplog):
    class Picky(RolloutCallback):
        num = 0

        def after_rollout(self, batch):
            self.num += 1
            return self.num not in (8, 13)

    make_trainer(tmp_path, callbacks=[picky := Picky()], max_steps=2).train()
    said = [record.getMessage() for record in caplog.records if "Picky.after_rollout" in record.getMessage()]
    assert [text.split()[0] for text in said] == ["4", "4"] and picky.num == 13


def test_each_event_gets_a_batch_that_has_all_that_its_class_declares(tmp_path):
    """What a later stage finds out is a field of that stage's batch, not one that is empty before."""
    seen = {}

    def note(event, batch):
        seen[event] = type(batch)
        assert [item.name for item in fields(batch) if not hasattr(batch, item.name)] == []

    class Looks(RolloutCallback):
        def after_rollout(self, batch):
            note("after_rollout", batch)

        def after_scores(self, batch):
            note("after_scores", batch)

        def keep(self, batch):
            note("keep", batch)

        def rollout_end(self, batch, output):
            note("rollout_end", batch)
            assert batch is trainer.last_batch and len(batch.training_rows) == len(batch.trajectories)

    trainer = make_trainer(tmp_path, callbacks=[Looks()])
    scored_batch(trainer)
    assert seen == {
        "after_rollout": RolloutBatch, "after_scores": ScoredBatch, "keep": ScoredBatch, "rollout_end": UpdateBatch
    }  # fmt: skip


def test_after_scores_knows_who_is_in_the_baseline_and_in_the_loss(tmp_path):
    class Looks(RolloutCallback):
        seen = None

        def after_scores(self, batch):
            self.seen = [batch.in_baseline.tolist(), batch.in_loss.tolist(), batch.reward_values.shape]
            batch.trajectories[0].is_scored = False

    trainer = make_trainer(tmp_path, callbacks=[looks := Looks()], min_group_size=4)
    scored_batch(trainer)
    assert looks.seen == [[True] * 8, [True] * 8, (8, 1)]
    assert trainer.last_batch.in_baseline.tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("options", [{}, {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 1.0}])
def test_a_step_without_trajectories_names_who_left_them_out(tmp_path, caplog, options):
    class Nothing(RolloutCallback):
        def keep(self, batch):
            return torch.zeros(len(batch.trajectories), dtype=torch.bool)

    class Everything(RolloutCallback):
        def keep(self, batch):
            return torch.ones(len(batch.trajectories), dtype=torch.bool)

    trainer = make_trainer(tmp_path, callbacks=[Nothing(), Everything()], **options)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert trainer.kept_rows.num_skipped == 1
    assert all(map(torch.equal, before, trainer.model.parameters()))
    (said,) = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    assert said.startswith("Optimizer step 1 was skipped, because Nothing.keep left no trajectory of the rollout")


@pytest.mark.parametrize(
    "callbacks, wrong", [([object], "callback"), (["a.path"], "callback"), (RolloutCallback(), "list"), ((), "list")]
)
def test_what_is_no_list_of_callbacks_is_refused_with_the_fix(tmp_path, callbacks, wrong):
    with pytest.raises(ValueError, match=rf"^callbacks: .* is no {wrong}\. Pass callbacks=\[MyCallback\(\)\]"):
        make_trainer(tmp_path, callbacks=callbacks)


def test_a_misspelt_event_is_said_and_a_method_of_ones_own_is_not(tmp_path, caplog):
    class Typo(RolloutCallback):
        def keeps(self, batch): ...
        def after_score(self, batch): ...
        def on_step_ends(self, batch): ...
        def count_turns(self, batch): ...

    make_trainer(tmp_path, callbacks=[Typo()])
    said = sorted(record.getMessage() for record in caplog.records if "is no event" in record.getMessage())
    meant = {"after_score": "after_scores", "keeps": "keep", "on_step_ends": "on_step_end"}
    assert said == [f"Typo.{name} is no event. Did you mean {event!r}?" for name, event in meant.items()]


def test_what_a_callback_puts_into_info_is_logged_as_the_page_says(tmp_path):
    class Notes(RolloutCallback):
        def after_rollout(self, batch):
            self.note(batch, "rollout")

        def after_scores(self, batch):
            self.note(batch, "scores")

        def rollout_end(self, batch, output):
            self.note(batch, "end")

        def note(self, batch, name):
            for item in batch.trajectories:
                item.info[name] = 1

    trainer = make_trainer(tmp_path, callbacks=[Notes()], eval_dataset=questions(2), record_trajectories="jsonl")
    trainer.train()
    logged = trainer.state.log_history[0]
    assert {name for name in logged if name.startswith("env/")} == {"env/rollout", "env/scores"}
    evaluated = trainer.evaluate()
    assert {name for name in evaluated if "env/" in name} == {"eval_env/rollout"}
    recorded = [file.read_text() for file in (tmp_path / "trajectories").glob("*.jsonl")]
    assert any('"scores":1' in text and '"end":1' in text for text in recorded)


def test_an_exception_in_an_event_of_transformers_is_named_and_kept_and_one_of_a_library_is_left_alone(tmp_path):
    class Broken(TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            raise KeyError("no such thing")

    class Late(RolloutCallback):
        def on_step_end(self, *args, **kwargs):
            1 / 0  # noqa: B018

    for callback, event, cause in ((Broken(), "on_evaluate", KeyError), (Late(), "on_step_end", ZeroDivisionError)):
        trainer = make_trainer(tmp_path, callbacks=[callback], eval_dataset=questions(2))
        with pytest.raises(OwnObjectError, match=rf"^callbacks: {type(callback).__name__}.{event} raised") as caught:
            trainer.evaluate() if event == "on_evaluate" else trainer.train()
        assert isinstance(caught.value.__cause__, cause)
        assert f"({__file__}, line {callback.__class__.__dict__[event].__code__.co_firstlineno + 1})" in str(
            caught.value
        )

    class Pruned(Exception):
        pass

    class Prunes(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise Pruned

    with pytest.raises(Pruned):  # whose script catches it
        make_trainer(tmp_path, callbacks=[Prunes()]).train()
    stopping = EarlyStoppingCallback()
    with pytest.raises(AssertionError, match="EarlyStoppingCallback requires"):
        make_trainer(tmp_path, callbacks=[stopping]).train()
