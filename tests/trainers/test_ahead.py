"""Rollouts that run ahead of the update."""

import asyncio
import itertools
import multiprocessing
import os
import time

import pytest
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.generation.base import current_slot
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from agent_r1_trl.trainers.ahead import Lookahead
from agent_r1_trl.trainers.rollouts import training_order
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.versions import SAMPLED, LateChat, Weights, gaps_to_named_weights, sampled

AHEAD = {"rollouts_ahead": 1}


# -------------------------------------------------------------------- looking ahead


def test_batches_that_were_passed_on_are_there_until_they_are_done():
    lookahead, source = Lookahead(), iter("abcdef")
    window = lookahead.over(source, 0)
    assert (next(window), next(window), next(window), window.at(1)) == ("a", "b", "c", "b")
    window = lookahead.over(source, 3)
    assert list(lookahead._batches) == [] and (next(window), window.at(5), window.at(6)) == ("d", "f", None)
    assert list(window) == ["e", "f"]


def test_the_windows_worker_processes_end_with_the_run(tmp_path):
    trainer, _ = watched(tmp_path, rollouts_ahead=2, dataloader_num_workers=1, max_steps=4)
    before = multiprocessing.active_children()
    trainer.train()
    assert multiprocessing.active_children() == before, "those of the next epoch's batches as well"


# -------------------------------------------------------------------- where rows come from


def backwards(batches):
    """Another order of generation batches of eight rows."""
    rows = list(batches)
    return [row for start in range(len(rows) - 8, -1, -8) for row in rows[start : start + 8]]


class OwnSampler(MultiTurnGRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return backwards(super()._get_train_sampler(dataset))


class OtherEpochs(MultiTurnGRPOTrainer):
    """A sampler with an order of its own in each epoch, which nobody can know before it begins."""

    def _get_train_sampler(self, dataset=None):
        num_epochs = itertools.count()

        class Epochs(list):
            def __iter__(self):
                first = next(num_epochs)
                return iter([row for place in range(3) for row in [(first + place) % 6] * 4 + [(first + 2) % 6] * 4])

        return Epochs(range(24))


class OwnLoader(MultiTurnGRPOTrainer):
    def get_train_dataloader(self):
        rows = [row for row in self.train_dataset for _ in range(4)]
        loader = DataLoader(backwards(rows), batch_size=8, collate_fn=list)
        return self.accelerator.prepare(loader)


def streamed():
    return IterableDataset.from_generator(lambda: iter(questions(6)))


SOURCES = {
    "own sampler": {"trainer": OwnSampler},
    "own epochs": {"trainer": OtherEpochs},
    "own loader": {"trainer": OwnLoader},
    "streamed": {"train_dataset": streamed},
    "streamed by a worker": {"train_dataset": streamed, "dataloader_num_workers": 1},
    "workers that stay": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "not shuffled": {"shuffle_dataset": False},
    "epochs": {"max_steps": -1, "num_train_epochs": 2.34},
    "one rollout an epoch": {"train_dataset": lambda: questions(2), "max_steps": -1, "num_train_epochs": 7},
    "a last step of fewer batches": {
        "train_dataset": lambda: questions(7), "max_steps": 5, "steps_per_generation": 3,
        "gradient_accumulation_steps": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", SOURCES.values(), ids=SOURCES)
def test_rows_are_the_synchronous_runs_wherever_they_come_from_and_none_is_begun_behind_the_end(tmp_path, options):
    runs = []
    for rollouts_ahead in (0, 2):
        watch, begun = Watch(), []
        options = {"train_dataset": lambda: questions(6), "max_steps": 5, "learning_rate": 0.0, **options}
        rows = options["train_dataset"]()
        watch.trainer = trainer = make_trainer(
            tmp_path / str(rollouts_ahead),
            callbacks=[watch],
            **options | {"rollouts_ahead": rollouts_ahead, "train_dataset": rows},
        )
        start = trainer.rollouts._start

        def note(rows, micro_step, position, start=start, begun=begun):
            begun.append(micro_step)
            return start(rows, micro_step, position)

        trainer.rollouts._start = trainer.rollouts.ahead._start = note
        trainer.train()
        runs.append((watch.trained_on, begun))
    assert runs[1] == runs[0]
    assert any(watch.has_next)


# -------------------------------------------------------------------- training


class Watch(TrainerCallback):
    """Keeps what each update was trained on and how far the next rollout had come when it began."""

    def __init__(self):
        self.trainer = None
        self.trained_on = []
        self.has_next = []

    def on_substep_end(self, args, state, control, **kwargs):
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        self.trained_on.append([(t.prompt_messages, t.completion_ids) for t in self.trainer.last_trajectories])
        self.has_next.append(len(self.trainer.rollouts.ahead) > 0)


def watched(tmp_path, max_steps=5, **options):
    watch = Watch()
    watch.trainer = make_trainer(
        tmp_path, callbacks=[watch], train_dataset=questions(6), max_steps=max_steps, use_vllm=True, **options
    )
    return watch.trainer, watch


BATCHES = ("steps_per_generation", "gradient_accumulation_steps", "num_iterations")


QUICK = [(1, 2, 1), (3, 2, 1)]
OTHERS = sorted({*itertools.product((1, 2, 3), repeat=3)} - {*QUICK})


@pytest.mark.parametrize(
    "numbers", [*QUICK, *(pytest.param(numbers, marks=pytest.mark.matrix) for numbers in OTHERS)], ids=str
)
def test_it_trains_on_what_the_synchronous_run_trains_on(tmp_path, numbers):
    options = {
        "learning_rate": 0.0,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 80,
    }
    options |= dict(zip(BATCHES, numbers, strict=True))
    options["max_steps"] = -(-7 * numbers[0] * numbers[2] // (3 * numbers[1]))  # two to three rollouts, or all epochs
    plain, expected = watched(tmp_path / "plain", **options)
    plain.train()
    trainer, watch = watched(tmp_path / "ahead", rollouts_ahead=1, **options)
    trainer.train()
    assert watch.trained_on == expected.trained_on
    assert len({str(rows) for rows in watch.trained_on}) > 1
    assert any(watch.has_next) and not any(expected.has_next)


def test_a_rollout_is_under_way_in_every_update_but_the_last(tmp_path):
    trainer, watch = watched(tmp_path, **AHEAD)  # 6 questions, 2 a step: 3 steps an epoch
    trainer.train()
    assert watch.has_next == [True, True, True, True, False]
    logged = [entry for entry in trainer.state.log_history if "sampling/staleness" in entry]
    assert logged[0]["sampling/staleness"] == 0 and len(logged) == 5
    assert all(entry["sampling/staleness_max"] <= 1 and entry["time/wait_s"] >= 0 for entry in logged)


class NoisyEnv(AddEnv):
    """Draws from torch's global random numbers, another number of them every time."""

    def reset(self, example):
        torch.rand(1 + os.urandom(1)[0])
        return super().reset(example)


def test_the_order_of_the_rows_hangs_on_no_draw_of_the_next_rollout(tmp_path):
    runs = []
    for _ in range(2):
        trainer, _ = watched(
            tmp_path, env=NoisyEnv, max_steps=4, steps_per_generation=2, per_device_train_batch_size=4, **AHEAD
        )
        rows, loss = [], trainer._compute_loss

        def compute_loss(model, inputs, rows=rows, loss=loss):
            rows.append(inputs["completion_ids"].tolist())
            return loss(model, inputs)

        trainer._compute_loss = compute_loss
        trainer.train()
        runs.append(rows)
    assert runs[0] == runs[1]
    assert [len(rows) for rows in runs[0]] == [4] * 4


def test_a_seeded_order_does_not_depend_on_what_was_drawn_before():
    orders = []
    for _ in range(2):
        orders.append(training_order(6, seed=3, step=7, is_seeded=True).tolist())
        torch.rand(1)
    assert orders[0] == orders[1] != list(range(6)) and sorted(orders[0]) == list(range(6))
    assert training_order(6, seed=3, step=8, is_seeded=True).tolist() != orders[0]
    torch.manual_seed(5)
    expected = torch.randperm(6)
    torch.manual_seed(5)
    assert torch.equal(training_order(6, seed=3, step=7, is_seeded=False), expected), "TRL's order"


class HeldEnv(AddEnv):
    """Knows how many of its kind are sampling; those of a rollout ahead do not begin before its turn has come."""

    sampling = 0
    allowed = 0

    async def reset(self, example):
        HeldEnv.sampling += 1
        while current_slot.get().order > HeldEnv.allowed:
            await asyncio.sleep(0.01)
        return super().reset(example)

    async def close(self):
        HeldEnv.sampling -= 1


def held(tmp_path, monkeypatch, update, **options):
    """A trainer whose later rollouts are held until their turn has come; `update` hears how many trajectories wait."""
    trainer, _ = watched(tmp_path, env=HeldEnv, **{**AHEAD, **options})
    take, loss = trainer.rollouts.ahead.take, trainer._compute_loss

    def allow(rows, position):
        HeldEnv.allowed = position.micro_step
        return take(rows, position)

    def compute_loss(*args):
        wait_until(lambda: HeldEnv.sampling == 8 * len(trainer.rollouts.ahead))
        update(HeldEnv.sampling)
        return loss(*args)

    monkeypatch.setattr(trainer.rollouts.ahead, "take", allow)
    monkeypatch.setattr(trainer, "_compute_loss", compute_loss)
    return trainer


def wait_until(has_happened):
    deadline = time.monotonic() + 60
    while not has_happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_trajectories_are_sampled_while_the_update_runs(tmp_path, monkeypatch):
    sampling = []
    held(tmp_path, monkeypatch, sampling.append, rollouts_ahead=2).train()
    assert sampling == [16, 16, 16, 8, 0], "over the end of an epoch, which has three steps"


def test_a_run_that_fails_ends_the_rollout_under_way(tmp_path, monkeypatch):
    def fail(sampling):
        raise RuntimeError("out of memory")

    trainer = held(tmp_path, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert len(trainer.rollouts.ahead) == 0
    wait_until(lambda: HeldEnv.sampling == 0)


def test_evaluation_between_two_updates_leaves_the_rollout_under_way_to_its_update(tmp_path):
    options = {"eval_dataset": questions(2), "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    options["per_device_eval_batch_size"] = 8
    _, expected = plain = watched(tmp_path / "plain", learning_rate=0.0)
    plain[0].train()
    trainer, watch = watched(tmp_path / "ahead", rollouts_ahead=1, **options)
    trainer.train()
    evaluations = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 5
    assert watch.trained_on[1:] != watch.trained_on[:-1]
    assert [rows for rows in watch.trained_on if rows in expected.trained_on] == expected.trained_on


class BrokenEnv(ToolEnv):
    """An author's mistake: the outcome is no number. It shows on the second question."""

    def outcome_reward(self, trajectory):
        is_first = "question 0" in str(trajectory.prompt_messages)
        return 1.0 if is_first else "good"


def test_an_authors_mistake_in_the_next_rollout_is_heard(tmp_path):
    trainer, _ = watched(tmp_path, env=BrokenEnv, **AHEAD)
    with pytest.raises(ValueError, match="outcome_reward"):
        trainer.train()


class BlockingEnv(LateChat):
    """Holds the event loop once, in a later rollout, none of which has a turn behind it before the first has ended."""

    longest_s, num_ended, has_held = 0.01, 0, False

    async def step(self, message):
        while current_slot.get().order > 0 and BlockingEnv.num_ended < 8:
            await asyncio.sleep(0.01)
        if current_slot.get().order > 0 and not BlockingEnv.has_held:
            BlockingEnv.has_held = True
            time.sleep(20)
        return await super().step(message)

    def outcome_reward(self, trajectory):
        BlockingEnv.num_ended += 1
        return super().outcome_reward(trajectory)


def test_rollouts_that_a_call_has_stopped_begin_again_and_the_gate_waits_for_none_of_their_turns(tmp_path):
    expected = sampled(tmp_path / "plain", max_steps=3, learning_rate=0.0)
    kept = sampled(tmp_path, env=BlockingEnv, max_steps=3, rollouts_ahead=2, stall_timeout=0.8, learning_rate=0.0)
    assert BlockingEnv.has_held
    said = [[[item.completion_ids for item in batch] for batch in run.batches] for run in (expected, kept)]
    assert said[0] == said[1]


# -------------------------------------------------------------------- weights


AHEAD_OPTIONS = [{"rollouts_ahead": 1}, {"rollouts_ahead": 4}, {"rollouts_ahead": 2, "cut_turns": True}]


@pytest.mark.parametrize("options", AHEAD_OPTIONS, ids=str)
def test_every_turn_comes_from_the_weights_that_it_names(tmp_path, options):
    kept = sampled(tmp_path, **options)
    logged = [entry for entry in kept.trainer.state.log_history if "sampling/staleness_max" in entry]
    assert len(logged) == 6
    assert max(entry["sampling/staleness_max"] for entry in logged) <= options["rollouts_ahead"]
    assert max(entry["sampling/versions"] for entry in logged) > 1, "trajectories go on across syncs"
    found = list(gaps_to_named_weights(kept))
    assert max(gap for _, gap, _ in found) < 1e-5
    assert max(other for version, _, other in found if version) > 1e-3, "weights that are told apart"


@pytest.mark.parametrize("num", [1, 2, 4])
def test_without_a_learning_rate_it_trains_on_the_synchronous_runs_trajectories(tmp_path, num):
    """Whichever ends first: ids and rewards of every batch, and the evaluations beside what is in flight."""
    runs = []
    for rollouts_ahead in (0, num):
        options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "learning_rate": 0.0}
        options |= {"eval_dataset": questions(2), "num_generations_eval": 4}
        kept = sampled(tmp_path / str(rollouts_ahead), rollouts_ahead=rollouts_ahead, **options)
        evaluations = [entry["eval_reward"] for entry in kept.trainer.state.log_history if "eval_reward" in entry]
        batches = [[(item.completion_ids, item.total_reward) for item in batch] for batch in kept.batches]
        runs.append((batches, evaluations))
    assert len(runs[0][0]) == 6 and len(runs[0][1]) == 3
    assert runs[0] == runs[1]


class OwnSampler:
    """A user's: it keeps the model that it was given, and tells nobody whose weights these are."""

    def __init__(self, answer):
        self.answer, self.inner = answer, None

    def sync(self, model):
        self.inner = TransformersGenerator(model, pad_token_id=0, stop_token_ids=[])
        return self.answer

    async def generate(self, request):
        return await self.inner.generate(request)


@pytest.mark.parametrize("answer", [None, False])
def test_a_users_sampler_is_kept_out_of_the_update_unless_it_says_that_its_weights_are_its_own(tmp_path, answer):
    gate_is_open = []

    class Look(Weights):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            gate_is_open.append(self.trainer.rollouts.generator._is_open)

    kept = Look()
    options = {"wrap_generator": lambda _: OwnSampler(answer), "rollouts_ahead": 1, "max_steps": 3}
    kept.trainer = make_trainer(tmp_path, callbacks=[kept], **{**SAMPLED, **options})
    kept.trainer.train()
    assert gate_is_open == [False] * 3
    assert max(gap for _, gap, _ in gaps_to_named_weights(kept)) < 1e-5


class Change(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        args.rollouts_ahead = 1 - args.rollouts_ahead


@pytest.mark.parametrize("num", [0, 1])
def test_the_number_cannot_be_changed_in_the_middle_of_a_run(tmp_path, num):
    trainer = make_trainer(tmp_path, callbacks=[Change()], max_steps=3, rollouts_ahead=num)
    with pytest.raises(ValueError, match=f"rollouts_ahead={1 - num} .* made with {num}"):
        trainer.train()


# -------------------------------------------------------------------- a run that was stopped

SAVING = {"save_strategy": "steps", "save_steps": 2, "journal.keep": 99, "rollouts_ahead": 2}


def usable_turns(folder, step):
    """Seeds of the recorded turns of later rollouts that weights of at most so many steps have sampled."""
    seeds = set()
    for path in sorted((folder / "journal" / "rank0").iterdir()):
        recorded = read_rollout(path)
        if recorded.header["micro_step"] < step or recorded.header["optimizer_step"] > step:
            continue
        for item in recorded.trajectories:
            known = itertools.takewhile(lambda turn: all(version <= step for version, _ in turn.versions), item.turns)
            seeds |= {turn.sampled["seed"] for turn in known}
    return seeds


def test_no_turn_is_sampled_again_that_weights_up_to_the_checkpoint_had_said(tmp_path, monkeypatch):
    whole = sampled(tmp_path, **SAVING)
    usable = usable_turns(tmp_path, 2)
    assert len(usable) >= 8 * 3, "all turns of the rollout that comes next"
    asked, generate = set(), TransformersGenerator.generate

    def listen(generator, request):
        asked.add(request.seed)
        return generate(generator, request)

    monkeypatch.setattr(TransformersGenerator, "generate", listen)
    kept = Weights()
    kept.trainer = make_trainer(tmp_path, callbacks=[kept], **{**SAMPLED, **SAVING})
    kept.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(kept.batches) == 4
    assert asked and not asked & usable
    for item, before in zip(kept.batches[0], whole.batches[2], strict=True):
        assert (item.completion_ids, item.logprobs) == (before.completion_ids, before.logprobs)
        assert [turn.versions for turn in item.turns] == [turn.versions for turn in before.turns]
    kept.of_step = whole.of_step | kept.of_step
    assert max(gap for _, gap, _ in gaps_to_named_weights(kept)) < 1e-5


def test_a_replay_repeats_every_turn_with_the_weights_that_said_it(tmp_path):
    whole = sampled(tmp_path / "a", journal={"keep": 99}, rollouts_ahead=2)
    replayed = sampled(tmp_path / "b", journal={"replay": str(tmp_path / "a")}, rollouts_ahead=2)
    for batch, before in zip(replayed.batches, whole.batches, strict=True):
        assert [item.to_json() for item in batch] == [item.to_json() for item in before]
    weights = zip(replayed.trainer.model.parameters(), whole.trainer.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in weights)
