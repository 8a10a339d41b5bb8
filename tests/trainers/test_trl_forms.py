"""Tools, environments and reward functions of a TRL script, run by TRL's trainer and by ours with the same policy."""

import asyncio
import inspect
import json

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from trl import GRPOTrainer

from agent_r1_trl.environments.base import RewardError
from agent_r1_trl.testing import AddEnv, call, make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from agent_r1_trl.trainers.evaluation import EvaluationRows
from tests.trainers.helpers import add, make_args, questions, scored_batch
from tests.trainers.trl_twin import build_pair, plain_config, roll_out_pair, scripted_rows


async def async_add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    await asyncio.sleep(0)
    return a + b


def recite(a: int, b: int) -> str:
    """Recite a long text.

    Args:
        a: One number.
        b: The other.
    """
    return "word " * 400


class Totals:
    """Adds up; the reward is the total."""

    def reset(self, **row):
        self.row, self.total = row, 0

    def add(self, a: int, b: int) -> int:
        """Add to the total.

        Args:
            a: One number.
            b: The other.
        """
        self.total += a + b
        return self.total

    def get_reward(self):
        return float(self.total)


class Plain:
    """Scores nothing."""

    def reset(self, **row):
        self.row, self.total = row, -1

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One number.
            b: The other.
        """
        return a + b


class Picky(Totals):
    """Scores totals above 1."""

    def get_reward(self):
        return None if self.total == 1 else float(self.total)


class AsyncPicky(Picky):
    async def get_reward(self):
        await asyncio.sleep(0)
        return super().get_reward()


class Recorder:
    """A reward function that keeps what it was called with, and pays for a tool's text in the last message."""

    __name__ = "recorder"

    def __init__(self):
        self.calls = []

    def __call__(self, **arguments):
        self.calls.append(arguments)
        return [float(completion[-1]["content"] == "5") for completion in arguments["completions"]]


def ones(completions, **kwargs):
    return [1.0] * len(completions)


def roles(arguments):
    return [[message["role"] for message in completion] for completion in arguments["completions"]]


def always_call(row, turn):
    return call()


def call_then_answer(row, turn):
    return call(a=row, b=1) if turn == 0 else say("done")


def build(tmp_path, script=call_then_answer, trainer=MultiTurnGRPOTrainer, **arguments):
    """Our trainer alone, with a plain configuration of TRL's."""
    tokenizer = make_tokenizer("qwen3")
    defaults = {
        "model": make_policy(tokenizer), "args": plain_config(tmp_path), "train_dataset": questions(),
        "processing_class": tokenizer, "generator": scripted_rows(tokenizer, script),
    }  # fmt: skip
    return trainer(**(defaults | arguments))


def row_advantages(trainer):
    """Sorted: the order in which rows ask for their first turns is not that of the batch."""
    advantages = trainer.batch["advantages"]
    if advantages.dim() == 2:
        advantages = advantages[torch.arange(len(advantages)), advantages.abs().argmax(dim=1)]
    return sorted(advantages.tolist())


def metric(trainer, name):
    return trainer._metrics["train"][name][-1]


# -------------------------------------------------------------------- how a conversation ends


@pytest.mark.parametrize(
    ("options", "script", "tool", "num_messages"),
    [
        pytest.param({"max_tool_calling_iterations": 2}, always_call, add, 5, id="limit of iterations"),
        pytest.param({"max_tool_calling_iterations": 0}, always_call, add, 1, id="no iteration allowed"),
        pytest.param({}, call_then_answer, add, 3, id="answer"),
        pytest.param(
            {"max_completion_length": 100}, lambda row, turn: call("recite", a=1, b=2), recite, 1, id="no room"
        ),
        pytest.param({"max_completion_length": 9}, always_call, add, 1, id="call is cut"),
        pytest.param(
            {"max_completion_length": 900},
            lambda row, turn: call("nope", a=2, b=3) if turn < 5 else say("done"), add, 11,
            id="unknown tools",
        ),
        pytest.param(
            {"max_completion_length": 900}, lambda row, turn: call(a=1, b=1) if turn < 11 else say("done"), add, 23,
            id="many turns",
        ),
    ],
)  # fmt: skip
def test_reward_functions_read_the_conversation_that_trl_hands_over(tmp_path, options, script, tool, num_messages):
    recorder = Recorder()
    pair = roll_out_pair(tmp_path, script, options=options, reward_funcs=[recorder], tools=[tool])
    trl, ours = [roles(arguments) for arguments in recorder.calls]
    assert trl == ours
    assert all(len(completion) == num_messages and completion[-1] == "assistant" for completion in ours)
    assert metric(pair[1], "rewards/recorder/mean") == 0.0, "a tool's text earns nothing"


def test_messages_have_the_contents_and_calls_of_trls(tmp_path):
    recorder = Recorder()
    roll_out_pair(
        tmp_path, lambda row, turn: say("done") if turn else call(a=1, b=2), reward_funcs=recorder, tools=[add]
    )
    trl, ours = [arguments["completions"] for arguments in recorder.calls]

    def as_trl_writes(message):  # ours have ids besides
        called = [call["function"] for call in message.get("tool_calls", ())]
        return message["role"], message["content"], message.get("name"), called

    assert [list(map(as_trl_writes, row)) for row in trl] == [list(map(as_trl_writes, row)) for row in ours]
    assert trl[0][0]["tool_calls"] and trl[0][1]["content"] == "3"


def test_the_calls_beyond_trls_limit_are_not_run(tmp_path):
    pair = roll_out_pair(
        tmp_path, lambda row, turn: call(a=1, b=1), options={"max_tool_calling_iterations": 2},
        environment_factory=Totals,
    )  # fmt: skip
    for trainer in pair:
        assert [environment.total for environment in trainer.environments] == [4, 4, 4, 4]
    assert [item.stop_reason.value for item in pair[1].last_trajectories] == ["max_turns"] * 4
    assert pair[1].last_trajectories[0].action_mask[-1] == 1, "nothing stands after the last turn"


def test_our_own_configuration_keeps_its_limit_of_turns(tmp_path):
    trainer = build(tmp_path, tools=[add], reward_funcs=ones, args=make_args(tmp_path, max_completion_length=300))
    assert (trainer.rollouts.limits.max_turns, trainer.rollouts.limits.max_tool_calling_iterations) == (8, None)


# -------------------------------------------------------------------- get_reward


def asked(trainer, environments):
    """What the last reward function says of environments, called as TRL calls its own."""
    rewards = trainer.reward_funcs[-1](environments=environments)
    return asyncio.run(rewards) if inspect.isawaitable(rewards) else rewards


@pytest.mark.parametrize("kind", [Totals, Picky, AsyncPicky])
def test_a_reward_column_may_be_asked_about_environments_alone(tmp_path, kind):
    other, one, five = Plain(), kind(), kind()
    other.total, one.total, five.total = 9, 1, 5
    environments = [five, other, one]
    expected = [5.0, None, 1.0 if kind is Totals else None]
    arguments = {"args": plain_config(tmp_path), "train_dataset": questions(), "environment_factory": kind}
    tokenizer = make_tokenizer("qwen3")
    trl = GRPOTrainer(model=make_policy(tokenizer), processing_class=tokenizer, **arguments)
    ours = build(tmp_path, environment_factory=kind)
    assert asked(trl, environments) == asked(ours, environments) == expected
    with_turns = build(
        tmp_path, environment_factory=kind, turn_reward_funcs=lambda trajectory, **kwargs: [None] * len(trajectory)
    )
    assert asked(with_turns, environments) == [None] * 3  # the last column is that of the turns, which these lack


@pytest.mark.parametrize("environment", [Picky, AsyncPicky])
def test_a_reward_of_none_means_not_scored(tmp_path, environment):
    trl, ours = roll_out_pair(tmp_path, call_then_answer, environment_factory=environment)
    # Totals 1, 2, 3, 4: the first is not scored; of the others the mean is 3 and the standard deviation 1.
    assert row_advantages(ours) == pytest.approx([-0.9999, 0.0, 0.0, 0.9999], abs=1e-4)
    assert row_advantages(ours) == pytest.approx(row_advantages(trl), abs=1e-6)
    for name in ("reward_parts/" + environment.__name__, "reward/outcome", f"rewards/{environment.__name__}/mean"):
        assert metric(ours, name) == pytest.approx(3.0)
    assert metric(ours, "group/reward_std") == pytest.approx(1.0)
    unscored = [item for item in ours.last_trajectories if not item.is_scored]
    assert len(unscored) == 1 and unscored[0].reward_parts == {} and not unscored[0].in_baseline


class PropertyReward(Plain):
    @property
    def get_reward(self):
        raise AssertionError("a property is no method, and is not evaluated")


@pytest.mark.parametrize("factory", [Plain, PropertyReward, {"a": Plain}], ids=str)
def test_an_environment_without_get_reward_needs_another_source(tmp_path, factory):
    rows = Dataset.from_list([{"environment": "a"}] * 4)
    with pytest.raises(ValueError, match="No reward source"):
        build(tmp_path, environment_factory=factory, train_dataset=rows)
    trainer = build(tmp_path, environment_factory=factory, train_dataset=rows, reward_funcs=ones)
    assert trainer.reward_func_names == ["ones"]
    by_turns = build(
        tmp_path, environment_factory=factory, train_dataset=rows,
        turn_reward_funcs=lambda trajectory, **kwargs: [[1.0] * len(item.turns) for item in trajectory],
    )  # fmt: skip
    scored_batch(by_turns)
    assert by_turns.reward_func_names == ["turn_rewards"]
    assert (
        metric(by_turns, "reward")
        == pytest.approx(2.0)
        == pytest.approx(metric(by_turns, "rewards/turn_rewards/mean"))
    )


# -------------------------------------------------------------------- columns of rewards


def test_every_class_with_a_reward_has_a_column_after_the_users_functions(tmp_path):
    rows = Dataset.from_list([{"environment": name} for name in ("one", "two", "plain", "picky")])
    factories = {"one": Totals, "two": Totals, "plain": Plain, "picky": Picky}
    trl, ours = roll_out_pair(
        tmp_path, call_then_answer, environment_factory=factories, train_dataset=rows, reward_funcs=ones,
        options={"per_device_train_batch_size": 8, "num_generations": 2, "reward_weights": [0.5]},
    )  # fmt: skip
    for trainer in (trl, ours):
        assert trainer.reward_func_names == ["ones", "Totals", "Picky"]
        assert trainer.reward_weights.tolist() == [0.5, 1.0, 1.0]
        assert len(trainer.reward_funcs) == len(trainer.reward_processing_classes) == 3
    assert [tool.__name__ for tool in ours.tools] == [tool.__name__ for tool in trl.tools]
    scored = {
        kind: [item.reward_parts for item, env in zip(ours.last_trajectories, ours.environments, strict=True)
               if type(env) is kind]
        for kind in (Totals, Plain, Picky)
    }  # fmt: skip
    assert all(set(parts) == {"ones", "Totals"} for parts in scored[Totals]) and len(scored[Totals]) == 4
    assert all(parts == {"ones": 0.5} for parts in scored[Plain])


def test_our_own_environments_reward_stands_last_as_environment_reward(tmp_path):
    trainer = build(tmp_path, env=AddEnv, reward_funcs=ones, args=plain_config(tmp_path, reward_weights=[3.0]))
    assert trainer.reward_func_names == ["ones", "environment_reward"]
    assert trainer.reward_weights.tolist() == [3.0, 1.0]
    scored_batch(trainer)
    assert metric(trainer, "reward") == pytest.approx(3.0 + metric(trainer, "rewards/environment_reward/mean"))


def test_turn_rewards_stand_beside_the_environments_column(tmp_path):
    async def per_turn(trajectory, id, **columns):
        assert len(id) == len(trajectory)
        return [[0.25] * len(item.turns) for item in trajectory]

    trainer = build(tmp_path, environment_factory=Picky, turn_reward_funcs=per_turn)
    scored_batch(trainer)
    assert trainer.reward_func_names == ["Picky", "turn_rewards"]
    assert metric(trainer, "rewards/Picky/mean") == pytest.approx(3.0)  # of the three that it scores
    assert metric(trainer, "rewards/turn_rewards/mean") == pytest.approx(0.5)
    assert metric(trainer, "reward") == pytest.approx((0.5 + 2.5 + 3.5 + 4.5) / 4)
    assert all(item.is_scored for item in trainer.last_trajectories)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("reward_weights", {"reward_funcs": ones}),
        ("reward_processing_classes", {"reward_funcs": [ones, Recorder()], "reward_processing_classes": [None]}),
    ],
)
def test_weights_and_processing_classes_are_as_many_as_the_users_functions(tmp_path, name, arguments):
    args = plain_config(tmp_path, reward_weights=[1, 1])
    with pytest.raises(ValueError, match=rf"{name}=.*must match"):
        build(tmp_path, environment_factory=Totals, args=args, **arguments)


# -------------------------------------------------------------------- what reward functions receive


def test_a_function_that_lists_trls_arguments_and_no_more_works(tmp_path):
    seen = []

    def exact(prompts, completions, completion_ids, id, trainer_state, log_extra, log_metric, environments):
        seen.append((prompts, id, environments))
        return [1.0] * len(prompts)

    async def exact_async(
        prompts, completions, completion_ids, id, trainer_state, log_extra, log_metric, environments
    ):
        return exact(prompts, completions, completion_ids, id, trainer_state, log_extra, log_metric, environments)

    pair = roll_out_pair(tmp_path, call_then_answer, reward_funcs=[exact, exact_async], environment_factory=Totals)
    assert pair[0].reward_func_names == pair[1].reward_func_names == ["exact", "exact_async", "Totals"]
    assert seen[0][:2] == seen[1][:2] == seen[2][:2] == seen[3][:2]
    assert all(type(environment) is Totals for environment in seen[3][2])


def test_a_function_that_takes_less_than_trl_passes_raises_and_is_told_what_it_gets(tmp_path):
    def short(prompts, completions):
        return [1.0] * len(prompts)

    pair = build_pair(tmp_path, call_then_answer, reward_funcs=short, tools=[add])
    for trainer, kind in zip(pair, (TypeError, RewardError), strict=True):
        with pytest.raises(kind, match="unexpected keyword"):
            scored_batch(trainer)


def test_a_column_that_a_function_logs_now_and_then_stays_beside_its_rows(tmp_path):
    """The table holds the last 8 rows: evaluations of 2, and rollouts of 8."""

    def logs(completions, trainer_state, log_extra, **kwargs):
        if len(completions) == 2 and trainer_state.global_step:
            log_extra("step", [trainer_state.global_step] * 2)
        return [float(trainer_state.global_step)] * len(completions)

    args = plain_config(
        tmp_path, log_completions=True, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=2,
        per_device_eval_batch_size=2, num_generations_eval=1, per_device_train_batch_size=8,
    )  # fmt: skip
    arguments = {"tools": [add], "args": args, "eval_dataset": questions().select(range(2))}
    trainer = build(tmp_path, reward_funcs=logs, **arguments)
    trainer.train()
    assert list(trainer._logs["extra"]["step"]) == [None] * 6 + [2] * 2
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table["step"].tolist()[-2:] == [1, 1] and table["logs"].tolist() == [0.0] * 6 + [1.0] * 2


def test_trainer_environments_and_tools_are_those_of_trl(tmp_path):
    trl, ours = roll_out_pair(tmp_path, call_then_answer, environment_factory=Totals, tools=[async_add])
    assert sorted(item.total for item in trl.environments) == sorted(item.total for item in ours.environments)
    assert sorted(item.total for item in ours.environments) == [1, 2, 3, 4], "nothing has reset them afterwards"
    assert [tool.__name__ for tool in ours.tools] == [tool.__name__ for tool in trl.tools] == ["async_add", "add"]
    plain = build(tmp_path, tools=[add], reward_funcs=ones)
    assert (plain.tools, plain.environments) == ([add], None)
    scored_batch(plain)
    assert plain.environments is None
    assert metric(ours, "tools/call_frequency") == metric(trl, "tools/call_frequency") == 1.0
    assert metric(ours, "tools/failure_frequency") == metric(trl, "tools/failure_frequency") == 0.0


def reward_model(folder, tokenizer):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_a_reward_model_scores_conversations_with_tools(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    model = reward_model(tmp_path / "judge", tokenizer)
    arguments = {"reward_processing_classes": [tokenizer, None], "environment_factory": Totals}
    trl, ours = roll_out_pair(tmp_path, call_then_answer, reward_funcs=[model, ones], **arguments)
    assert ours.reward_func_names == trl.reward_func_names
    name = f"rewards/{ours.reward_func_names[0]}/mean"
    assert metric(ours, name) == pytest.approx(metric(trl, name), abs=1e-6) and metric(ours, name) != 0.0
    by_path = build(tmp_path, reward_funcs=str(tmp_path / "judge"), environment_factory=Totals)
    scored_batch(by_path)
    assert by_path.reward_func_names == ["judge", "Totals"]
    assert metric(by_path, "rewards/judge/mean") == pytest.approx(metric(trl, name), abs=1e-5)


def test_rows_that_fill_up_an_evaluation_are_neither_refused_nor_warned_of(tmp_path, caplog):
    """Their rewards become NaN, which a reward model of the user's must not return."""
    reward_model(tmp_path / "judge", make_tokenizer("qwen3"))
    trainer = build(tmp_path, reward_funcs=str(tmp_path / "judge"), environment_factory=Totals)
    rows = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    trainer.evaluation = EvaluationRows(len(rows) - 1)
    trainer._generate_and_score_completions(rows)
    batch = trainer.last_batch
    assert [item.in_baseline for item in batch.trajectories] == [True] * (len(rows) - 1) + [False]
    assert batch.reward_values[-1].isnan().all() and not batch.reward_values[:-1, 0].isnan().any()
    assert "returned None" not in caplog.text


# -------------------------------------------------------------------- columns of the data set


def test_a_column_that_some_rows_of_a_stream_lack_is_none_there(tmp_path):
    question = {"prompt": [{"role": "user", "content": "add"}]}
    seen = []

    def reads(completions, answer, **kwargs):
        seen.append(answer)
        return [1.0] * len(completions)

    def pays(trajectory, answer, **kwargs):
        seen.append(answer)
        return [None] * len(trajectory)

    args = plain_config(tmp_path, per_device_train_batch_size=8)
    trainer = build(tmp_path, args=args, reward_funcs=reads, turn_reward_funcs=pays, tools=[add])
    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_and_score_completions([question] * 4 + [question | {"answer": 1}] * 4)
    assert seen == [[None] * 4 + [1] * 4] * 2


TAKEN = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "trajectory"]


@pytest.mark.parametrize("column", [*TAKEN, "environments"])
def test_a_column_that_reward_functions_could_not_see_is_refused(tmp_path, column):
    data = questions().add_column(column, ["mine"] * 8)
    for arguments in ({"train_dataset": data}, {"eval_dataset": data}, {"eval_dataset": {"held_out": data}}):
        with pytest.raises(ValueError, match=f"column '{column}'.*rename_column"):
            build(tmp_path, environment_factory=Totals, **arguments)
    build(tmp_path, environment_factory=Totals, train_dataset=data.rename_column(column, "free"))  # the fix


def test_columns_called_environment_reach_functions_as_in_trl(tmp_path):
    seen = []

    def look(environment, **kwargs):
        seen.append((environment, kwargs.get("environments")))
        return [1.0] * len(environment)

    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "q"}], "environment": "x", "environments": "y"}] * 4
    )
    roll_out_pair(tmp_path, call_then_answer, tools=[add], train_dataset=rows, reward_funcs=look)
    assert seen[0] == seen[1] == (["x"] * 4, ["y"] * 4)
    scored_batch(
        build(
            tmp_path, environment_factory=Totals, train_dataset=rows.remove_columns("environments"), reward_funcs=look
        )
    )
    assert seen[2][0] == ["x"] * 4


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"environment": "one", "prompts": "mine"}] * 4, r"column 'prompts'.*rename_column"),
        ([{"environment": name} for name in ("one", "one", "chess", "one")], "environment='chess'"),
    ],
)
def test_rows_of_a_stream_are_checked_when_their_batch_arrives(tmp_path, rows, said):
    stream = IterableDataset.from_generator(lambda: iter(rows))
    args = plain_config(tmp_path, num_generations=2, max_steps=2)
    with pytest.raises(ValueError, match=said):
        build(tmp_path, environment_factory={"one": Totals}, train_dataset=stream, args=args).train()


# -------------------------------------------------------------------- several environments


def routed(*names):
    return Dataset.from_list([{"environment": name} for name in names])


@pytest.mark.parametrize(
    ("rows", "evaluated"),
    [
        (routed("one", "one", "one", "chess"), None),
        (routed("one", "one", "one", None), None),
        (questions(4), None),
        (routed("one"), routed("chess")),
        (routed("one"), {"held_out": routed("one"), "other": routed("chess")}),
    ],
    ids=["unknown", "none", "no column", "eval", "named eval"],
)
def test_a_name_that_no_environment_has_is_refused(tmp_path, rows, evaluated):
    with pytest.raises(ValueError, match=r"environment=.*not among the environments.*\['one'\]"):
        build(tmp_path, environment_factory={"one": Totals}, train_dataset=rows, eval_dataset=evaluated)


def test_several_environments_need_rows_that_choose_among_them(tmp_path):
    with pytest.raises(ValueError, match="requires a `train_dataset`"):
        build(tmp_path, environment_factory={"one": Totals}, train_dataset=None)
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        build(tmp_path, tools=[add], reward_funcs=ones, train_dataset=None)


def test_each_environment_offers_its_own_tools_and_is_reset_with_the_row(tmp_path):
    class Shouter:
        def reset(self, **row):
            self.row = row
            return "Shout."

        def shout(self, text: str) -> str:
            """Shout a text.

            Args:
                text: What to shout.
            """
            return text.upper()

        def get_reward(self):
            return -1.0

    def script(row, turn):
        return say("done") if turn else call("shout", text="hi")

    rows = Dataset.from_list([{"environment": name, "note": name} for name in ("add", "shout")])
    trl, ours = roll_out_pair(
        tmp_path, script, environment_factory={"add": Totals, "shout": Shouter}, train_dataset=rows,
        options={"num_generations": 2},
    )  # fmt: skip
    assert ours.reward_func_names == trl.reward_func_names == ["Totals", "Shouter"]
    for trainer in (trl, ours):
        assert [type(item) for item in trainer.environments] == [Totals, Totals, Shouter, Shouter]
        assert [set(item.row) - {"prompt"} for item in trainer.environments] == [{"note"}] * 4
        assert (metric(trainer, "tools/call_frequency"), metric(trainer, "tools/failure_frequency")) == (1.0, 0.5)
        assert metric(trainer, "rewards/Shouter/mean") == -1.0
    assert "shout" not in str(ours.chat.tokenizer.decode(ours.last_trajectories[0].prompt_ids))


# -------------------------------------------------------------------- arguments, evaluation, chat template


@pytest.mark.parametrize(
    "arguments", [{"tools": [add]}, {"environment_factory": Totals}], ids=["tools", "environment"]
)
def test_evaluation_takes_tools_and_environments(tmp_path, arguments):
    args = plain_config(tmp_path, per_device_eval_batch_size=4, num_generations_eval=2)
    trainer = build(tmp_path, reward_funcs=ones, eval_dataset=questions(4), args=args, **arguments)
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/ones/mean"] == 1.0 and metrics["eval_tools/call_frequency"] == 1.0
    with pytest.raises(ValueError, match="column 'trajectory'"):
        trainer.evaluate(questions(4).add_column("trajectory", ["x"] * 4))


# -------------------------------------------------------------------- functions that return strange things


def test_an_unscored_trajectory_hands_an_assistant_message_to_reward_functions(tmp_path):
    recorder = Recorder()

    class Broken(Totals):
        made = 0

        def reset(self, **row):
            type(self).made += 1
            if type(self).made == 2:
                raise RuntimeError("no connection")
            super().reset(**row)

    scored_batch(build(tmp_path, reward_funcs=recorder, environment_factory=Broken))
    endings = [completion[-1] for completion in recorder.calls[0]["completions"]]
    assert endings.count({"role": "assistant", "content": ""}) == 1


def test_a_table_of_completions_holds_arguments_and_columns_of_several_types(tmp_path):
    """As models write them: a number, a text, nothing or a list for the same argument."""
    arguments = [{"a": 1, "b": 2}, {"a": "one", "b": None}, {"a": [1, "x"]}, {"a": {"deep": 1}, "b": 2.5}]

    def logs(completions, log_extra=None, **columns):
        log_extra("mixed", [1, "two", None, [3]][: len(completions)])
        return [0.0] * len(completions)

    def script(row, turn):
        return say("done") if turn else call("add", **arguments[row % 4])

    build(tmp_path, script, reward_funcs=logs, tools=[add], args=plain_config(tmp_path, log_completions=True)).train()
    table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    calls = [json.loads("{" + text.splitlines()[0].partition("{")[2]) for text in table["completion"]]
    assert sorted(str(item["arguments"]) for item in calls) == sorted(map(str, arguments))
    assert [value for value in table["mixed"] if isinstance(value, str)] == ["1", "two", "[3]"]
