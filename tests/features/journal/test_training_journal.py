"""The journal of a training run: what a resumed run uses again, what is kept, and replay."""

import shutil
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.features.journal import JournalReplay, ReplayError
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.features.journal.records import pack, read_file
from agent_r1_trl.features.journal.training import fingerprint, reads_environments
from agent_r1_trl.generation.base import Generator
from agent_r1_trl.testing import AddEnv, make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.trainers.helpers import make_trainer, questions

SAVING = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}


class CountedEnv(AddEnv):
    num_resets = 0

    def reset(self, example):
        type(self).num_resets += 1
        return super().reset(example)


def train(folder, *, checkpoint=None, **options):
    """A finished run; `trainer.num_sampled` counts the turns that were not taken from a journal."""
    options = {"max_steps": 4, "env": CountedEnv, **SAVING, **options}
    trainer = make_trainer(folder, **options)
    trainer.batches = []
    score = trainer._generate_and_score_completions

    def keep(inputs):
        output = score(inputs)
        trainer.batches.append(output)
        return output

    trainer._generate_and_score_completions = keep
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.num_sampled = len(trainer.rollouts._generator.requests)
    return trainer


def journals(folder, rank=0):
    return sorted(path.name for path in (folder / "journal" / f"rank{rank}").glob("*"))


def is_same(batch, other):
    return batch.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else True for name, value in batch.items()
    )


# ---------------------------------------------------------------- going on


def test_a_resumed_run_samples_nothing_that_lies_behind_its_checkpoint(tmp_path):
    whole = train(tmp_path)
    assert whole.num_sampled == 4 * 4 * 2
    resumed = train(tmp_path, checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.num_sampled == 0 and all(map(is_same, resumed.batches, whole.batches[2:]))
    assert [item.to_json() for item in resumed.last_trajectories] == [
        item.to_json() for item in whole.last_trajectories
    ]


class Repaired(CountedEnv):
    """Its tool answers wrongly until it is repaired."""

    on_resume = "replay"
    answer = "wrong"

    async def step(self, message):
        observations, *others = await super().step(message)
        return [{**observation, "content": self.answer} for observation in observations], *others


def answers(trainer):
    turns = [turn for item in trainer.last_trajectories for turn in item.turns]
    return {observation["content"] for turn in turns for observation in turn.observations}


def test_a_tool_that_was_corrected_is_asked_again_once_the_journal_is_deleted_or_off(tmp_path):
    repaired = type("Repaired", (Repaired,), {"answer": "right"})
    checkpoint = str(tmp_path / "checkpoint-2")
    assert answers(train(tmp_path, env=Repaired, max_steps=3)) == {"wrong"}
    assert answers(train(tmp_path, env=repaired, max_steps=3, checkpoint=checkpoint)) == {"wrong"}, "as recorded"
    resumed = train(tmp_path, env=repaired, max_steps=3, checkpoint=checkpoint, journal=False)
    assert answers(resumed) == {"right"} and resumed.num_sampled == 4 * 2
    shutil.rmtree(tmp_path / "journal")
    assert answers(train(tmp_path, env=repaired, max_steps=3, checkpoint=checkpoint)) == {"right"}


def test_other_weights_roll_out_anew_and_say_why(tmp_path, caplog):
    train(tmp_path)
    trainer = make_trainer(tmp_path, env=CountedEnv, max_steps=4, **SAVING)
    load = trainer._load_optimizer_and_scheduler

    def load_and_change(checkpoint):
        load(checkpoint)
        with torch.no_grad():
            next(trainer.model.parameters()).view(-1)[0] += 1e-3

    trainer._load_optimizer_and_scheduler = load_and_change
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(trainer.rollouts._generator.requests) == 2 * 4 * 2
    assert "micro-step 2" in caplog.text and "weights differs" in caplog.text


def adapter_on(seed):
    """Options of a run whose adapter, but not the weights below it, are the same for every seed."""
    model = make_policy(make_tokenizer("qwen3"), seed=seed)
    model.config._name_or_path = f"models/base-{seed}"
    return {"model": model, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}


def test_an_adapter_goes_on_where_it_stopped_on_the_same_base_and_not_on_another(tmp_path):
    train(tmp_path, **adapter_on(0))
    checkpoint = str(tmp_path / "checkpoint-2")
    for value in (checkpoint, True):
        with pytest.raises(ValueError, match="resume_from_checkpoint=") as caught:
            train(tmp_path, checkpoint=value, **adapter_on(1))
        for text in ("'models/base-1'", "model_name_or_path='models/base-0'"):
            assert text in str(caught.value), text
    assert train(tmp_path, checkpoint=checkpoint, **adapter_on(0)).num_sampled == 0


@pytest.mark.parametrize(("base", "num_sampled"), [(0, 0), (1, 2 * 4 * 2)], ids=["the same base", "another base"])
def test_rollouts_of_a_run_without_a_checkpoint_are_used_again_on_the_same_base_only(
    tmp_path, base, num_sampled, caplog
):
    options = {"save_steps": 9, "max_steps": 2, "save_strategy": "steps", "learning_rate": 0.0}
    train(tmp_path, **options, **adapter_on(0))
    shutil.rmtree(tmp_path / "checkpoint-2", ignore_errors=True)
    resumed = train(tmp_path, resume_from_checkpoint="true", **options, **adapter_on(base))
    assert resumed.num_sampled == num_sampled
    assert ("base differs" in caplog.text) == (base == 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"temperature": 0.7}, "params"), ({"context.policy": "window", "context.turns": 1}, "limits")],
    ids=["sampling", "context"],
)
def test_other_settings_roll_out_anew(tmp_path, change, named, caplog):
    train(tmp_path, max_steps=3)
    resumed = train(tmp_path, max_steps=3, checkpoint=str(tmp_path / "checkpoint-2"), **change)
    assert resumed.num_sampled == 4 * 2 and f"{named} differs" in caplog.text


def test_a_run_that_begins_anew_uses_nothing_of_the_run_before_it_and_leaves_nothing_of_it(tmp_path):
    train(tmp_path, journal={"keep": 9})
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": questions(2)}  # which is in no journal
    assert train(tmp_path, max_steps=2, **evaluates).num_sampled > 2 * 4 * 2
    assert journals(tmp_path) == ["rollout_000000000.journal", "rollout_000000001.journal"]


def test_a_run_without_a_checkpoint_yet_goes_on_with_its_journal_if_it_was_to_be_resumed(tmp_path):
    train(tmp_path, max_steps=1)
    assert train(tmp_path, max_steps=1, resume_from_checkpoint="true").num_sampled == 0


class TRLCounter:
    """TRL's form, whose reward functions look at the instances."""

    on_resume = "replay"

    def reset(self, **row):
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        self.calls += 1
        return a + b


class ScoredTRLCounter(TRLCounter):
    def get_reward(self):
        return float(self.calls)


def calls_of(environments, **kwargs):
    return [float(environment.calls) for environment in environments]


def length_of(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]


@pytest.mark.parametrize(
    "form",
    [
        {"environment_factory": TRLCounter, "reward_funcs": [calls_of]},
        pytest.param({"environment_factory": ScoredTRLCounter}, marks=pytest.mark.matrix),
        {"environment_factory": ScoredTRLCounter, "reward_funcs": [length_of]},
        {"tools": [TRLCounter.add.__get__(TRLCounter())], "reward_funcs": [length_of]},
    ],
    ids=["environments", "get_reward", "both", "tools"],
)
def test_forms_of_trl_earn_the_same_when_they_come_from_the_journal(tmp_path, form, monkeypatch):
    monkeypatch.setattr(TRLCounter, "calls", 0, raising=False)
    whole = train(tmp_path, env=None, **form)
    resumed = train(tmp_path, env=None, **form, checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.num_sampled == 0 and all(map(is_same, resumed.batches, whole.batches[2:]))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (length_of, False),
        (calls_of, True),
        (lambda completions, **kwargs: [len(kwargs["environments"])], True),
        (lambda completions, **kwargs: [kwargs["environments"][i] for i in range(2)], True),
        (type("Scorer", (), {"__call__": lambda self, environments, **kwargs: []})(), True),
        (type("Scorer", (), {"__call__": lambda self, completions, **kwargs: []})(), False),
        (torch.nn.Linear(1, 1), False),
        (len, True),
    ],
)
def test_who_looks_at_environments_is_read_from_the_function(function, expected):
    assert reads_environments([function]) is expected


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"journal": {"keep": 1}}, [3, 4, 5]), ({"journal": {"keep": 2}, "save_strategy": "no"}, [3, 4, 5])],
    ids=["checkpoints", "none"],
)
def test_rollouts_before_the_last_checkpoint_go_but_for_those_to_keep(tmp_path, options, expected):
    """Without checkpoints: those to keep beside the present one."""
    train(tmp_path, max_steps=6, **options)
    assert journals(tmp_path) == [f"rollout_{number:09d}.journal" for number in expected]


def test_every_bit_of_the_weights_counts_and_frozen_ones_do_not():
    layer = torch.nn.Linear(3, 2).to(torch.bfloat16)
    before = fingerprint(layer.named_parameters())
    with torch.no_grad():
        layer.weight.view(-1).view(torch.int16)[0] += 1
    after = fingerprint(layer.named_parameters())
    assert after != before
    layer.weight.requires_grad = False
    frozen = fingerprint(layer.named_parameters())
    with torch.no_grad():
        layer.weight.zero_()
    assert fingerprint(layer.named_parameters()) == frozen


def test_the_fingerprint_comes_to_the_host_in_one_copy(monkeypatch):
    """On a GPU each copy waits for the device; a model has hundreds of tensors."""
    copies = []
    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, n=name, f=method, **k: copies.append(n) or f(*a, **k))
    fingerprint(torch.nn.Sequential(*[torch.nn.Linear(3, 2) for _ in range(9)]).named_parameters())
    assert copies == ["tolist"]


# ---------------------------------------------------------------- replay


@pytest.mark.parametrize("options", [{}, {"trainer": MultiTurnPPOTrainer, "num_generations": 1}], ids=["grpo", "ppo"])
def test_a_replay_trains_on_the_same_batches_without_sampler_tools_and_environment(tmp_path, options, caplog):
    options["lr_scheduler_type"] = "constant"
    whole = train(tmp_path / "a", journal={"keep": 9}, **options)
    CountedEnv.num_resets = 0
    replayed = train(tmp_path / "b", journal={"replay": str(tmp_path / "a")}, max_steps=9, **options)
    assert replayed.num_sampled == CountedEnv.num_resets == 0
    assert len(replayed.batches) == 4 and all(map(is_same, replayed.batches, whole.batches))
    assert "ends with optimizer step 4" in caplog.text
    assert not (tmp_path / "b" / "journal").exists()


@pytest.mark.parametrize("option", [{"rollouts_ahead": 2}, {"vllm_enable_sleep_mode": True}], ids=str)
def test_a_replay_of_a_run_with_an_engine_repeats_it_and_has_nothing_to_put_to_sleep(tmp_path, option):
    options = {"use_vllm": True, "lr_scheduler_type": "constant", **option}
    whole = train(tmp_path / "a", journal={"keep": 9}, max_steps=2, **options)
    replayed = train(tmp_path / "b", journal={"replay": str(tmp_path / "a")}, max_steps=9, **options)
    assert replayed.num_sampled == 0 and replayed.state.global_step == 2
    assert len(replayed.batches) == 2 and all(map(is_same, replayed.batches, whole.batches))


def test_a_replay_goes_on_where_the_last_step_of_an_epoch_has_fewer_micro_batches(tmp_path):
    """Of the three rollouts of an epoch, its first step takes two and its second one."""
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    train(tmp_path / "a", journal={"keep": 9}, train_dataset=questions(3), **options)
    replay = {"replay": str(tmp_path / "a")}
    replayed = train(tmp_path / "b", journal=replay, train_dataset=questions(3), **options)
    assert replayed.state.global_step == 4 and len(replayed.batches) == 6


class Flaky(Generator):
    """Fails in every seventh turn."""

    def __init__(self, inner):
        self.inner, self.num, self.requests = inner, 0, inner.requests

    async def generate(self, request):
        self.num += 1
        if self.num % 7 == 0:
            raise RuntimeError("flaky")
        return await self.inner.generate(request)


def test_a_replay_knows_of_the_tries_that_had_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("agent_r1_trl.rollout.runner.RETRY_WAIT_S", 0.0)
    whole = train(tmp_path / "a", journal={"keep": 9}, wrap_generator=Flaky, retry_failed=2)
    replayed = train(tmp_path / "b", journal={"replay": str(tmp_path / "a")}, retry_failed=2)
    tries, again = ([item.failed_tries for item in run.last_trajectories] for run in (whole, replayed))
    assert any(tries) and again == tries


def test_a_replay_with_another_reward_function_runs_it_on_the_recorded_completions(tmp_path):
    whole = train(tmp_path / "a", journal={"keep": 9})
    replayed = train(tmp_path / "b", journal={"replay": str(tmp_path / "a" / "journal")}, reward_funcs=[length_of])
    assert torch.equal(replayed.batches[0]["completion_ids"], whole.batches[0]["completion_ids"])
    assert not torch.equal(replayed.batches[0]["advantages"], whole.batches[0]["advantages"])


def test_what_cannot_be_replayed_is_named_with_the_first_thing_that_differs(tmp_path):
    rolled_out = train(tmp_path / "a", journal={"keep": 9}, max_steps=1).rollouts.limits
    replay = {"journal": {"replay": str(tmp_path / "a")}}
    limit = rf"max_observation_tokens={rolled_out.max_observation_tokens} was recorded, .*=7: .*Set max_obs"
    for change, message in (
        ({"train_dataset": questions(9)}, r"trajectory \d differs first in example_id"),
        ({"train_dataset": questions(8).map(lambda row: {"extra": 1})}, r"trajectory \d differs first in row"),
        ({"num_generations": 2}, r"trajectory \d differs first in (generation|example_id)"),
        ({"max_observation_tokens": 7}, limit),
        ({"temperature": 0.5}, r"temperature=1.0 was recorded, .*=0.5: .*Set temperature to 1.0"),
    ):
        with pytest.raises(ReplayError, match=f"journal.replay=.*{message}"):
            train(tmp_path / "b", **replay, **change)
    (path,) = (tmp_path / "a" / "journal" / "rank0").glob("*")
    (header, *records), other = read_file(path)[0], {"kind": "begin", "id": "of another form"}
    for content, message in (
        ([header, *records[:-1]], "journal.replay=.*has no end"),
        ([{**header, "version": 1}, other], r"a journal of version 1, and this release reads version 2\. Replay"),
    ):
        path.write_bytes(b"".join(map(pack, content)))
        with pytest.raises(ReplayError, match=message):
            train(tmp_path / "b", **replay)
    assert read_rollout(path).trajectories == [], "the version is compared before the records are read"


def test_a_replay_needs_the_rollout_that_the_run_begins_with(tmp_path):
    train(tmp_path / "a", journal={"keep": 0})
    with pytest.raises(ReplayError, match=r"no rollout of micro-step 0.*journal.keep"):
        train(tmp_path / "b", journal={"replay": str(tmp_path / "a")})
    resumed = train(
        tmp_path / "b", journal={"replay": str(tmp_path / "a")}, checkpoint=str(tmp_path / "a" / "checkpoint-2")
    )
    assert resumed.num_sampled == 0 and len(resumed.batches) == 2


def test_a_replay_from_nowhere_into_itself_or_beside_what_it_lacks_is_refused(tmp_path):
    with pytest.raises(ReplayError, match=r"journal.replay=.*no journal"):
        train(tmp_path / "b", journal={"replay": str(tmp_path / "a")})
    train(tmp_path / "a", max_steps=1)
    with pytest.raises(ValueError, match=r"journal.replay=.*output_dir"):
        train(tmp_path / "a", journal={"replay": str(tmp_path / "a")})
    with pytest.raises(ValueError, match=r"journal.replay=.*eval_strategy"):
        train(
            tmp_path / "b",
            journal={"replay": str(tmp_path / "a")},
            eval_strategy="steps",
            eval_steps=1,
            eval_dataset=questions(2),
        )
    with pytest.raises(ReplayError, match=r"replay.*environments"):
        train(tmp_path / "b", journal={"replay": str(tmp_path / "a")}, reward_funcs=[calls_of])
    assert JournalReplay(tmp_path / "a").micro_steps == [0]


# ---------------------------------------------------------------- context policies of one's own


def everything(view):
    return view.messages


def last_turn(view):
    return [*view.prompt_messages, view.turns[-1].message, *view.turns[-1].observations]


@dataclass(frozen=True)
class LastTurns:
    num: int

    def __call__(self, view):
        return view.messages if self.num > 1 else last_turn(view)


@pytest.mark.parametrize(
    ("first", "then", "is_same"),
    [
        (last_turn, f"{__name__}:last_turn", True),
        (f"{__name__}:last_turn", f"{__name__}:everything", False),
        (LastTurns(1), LastTurns(1), True),
        (LastTurns(1), LastTurns(2), False),
    ],
    ids=["object and path", "another path", "equal objects", "another object"],
)
def test_a_resumed_run_uses_what_the_same_policy_rolled_out_and_nothing_of_another(
    tmp_path, first, then, is_same, caplog
):
    options = {"max_steps": 3, "per_device_train_batch_size": 4}
    train(tmp_path, context={"policy": first}, **options)
    resumed = train(tmp_path, context={"policy": then}, checkpoint=str(tmp_path / "checkpoint-2"), **options)
    assert (resumed.num_sampled == 0) is is_same
    assert ("limits differs from what was recorded" in caplog.text) is not is_same
