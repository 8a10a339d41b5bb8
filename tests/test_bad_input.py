"""What a user gets wrong is answered with the flag, its value, the rule and the cure.

Covered: both configurations, tools, environments and arguments of the trainers, as code meets them. Not covered: the
commands (tests/cli), what a model gets wrong (tests/rollout).
"""

from __future__ import annotations

import pytest
from datasets import Dataset

from agent_r1_trl import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig, ToolEnv, tool
from agent_r1_trl.rewards import exact_match
from agent_r1_trl.tools import ToolSchemaError


def missing(parts, message) -> list[str]:
    return [part for part in parts if part not in message]


# ---------------------------------------------------------------- configuration

CONFIG = [
    ({"max_turns": 0}, ["max_turns=0", "whole number >= 1", "Set max_turns"]),
    ({"max_turns": 2.5}, ["max_turns=2.5", "whole number >= 1", "Set max_turns"]),
    ({"max_turns": True}, ["max_turns=True", "whole number >= 1", "Set max_turns"]),
    ({"max_tokens_per_turn": -1}, ["max_tokens_per_turn=-1", "whole number >= 1", "Set max_tokens_per_turn"]),
    ({"max_observation_tokens": 0}, ["max_observation_tokens=0", ">= 1", "Set max_observation_tokens"]),
    ({"max_invalid_calls": -1}, ["max_invalid_calls=-1", ">= 0", "Set max_invalid_calls"]),
    ({"max_concurrency": "many"}, ["max_concurrency='many'", ">= 1", "Set max_concurrency"]),
    ({"generation_batch_rows": 0}, ["generation_batch_rows=0", ">= 1", "Set generation_batch_rows"]),
    ({"max_completion_length": 0}, ["max_completion_length=0", "at least 1", "Set max_completion_length"]),
    ({"rollout_timeout": 0}, ["rollout_timeout=0", "> 0", "None"]),
    ({"rollout_timeout": "long"}, ["rollout_timeout='long'", "> 0", "None"]),
    ({"thinking": "loud"}, ["thinking='loud'", "'keep', 'off'", "Set thinking"]),
    ({"truncated_trajectories": "drop"}, ["truncated_trajectories='drop'", "'keep', 'mask'", "Set truncated"]),
    ({"truncation_penalty": 0.5}, ["truncation_penalty=0.5", "<= 0", "Set a negative number"]),
    ({"truncation_penalty": float("nan")}, ["truncation_penalty=nan", "finite", "Set a negative number"]),
    ({"eval_temperature": -1.0}, ["eval_temperature=-1.0", ">= 0", "None"]),
    ({"record_trajectories": "csv"}, ["record_trajectories='csv'", "'jsonl', 'parquet', 'none'", "Set record"]),
    ({"update_layout": "ragged"}, ["update_layout='ragged'", "'padded'", "Set update_layout"]),
    ({"gamma": 1.5}, ["gamma=1.5", "between 0 and 1", "Set gamma"]),
    ({"gamma_turn": -0.1}, ["gamma_turn=-0.1", "between 0 and 1", "Set gamma_turn"]),
    ({"process_reward_weight": float("inf")}, ["process_reward_weight=inf", "finite and >= 0", "Set process"]),
    ({"outcome_reward_weight": "all"}, ["outcome_reward_weight='all'", "finite and >= 0", "Set outcome"]),
    ({"process_reward_schedule": "fast"}, ["process_reward_schedule='fast'", "'constant'", "Set process"]),
    ({"advantage_estimator": "a2c"}, ["advantage_estimator='a2c'", "'gae'", "Set advantage_estimator"]),
    ({"kl_placement": "both", "beta": 0.1}, ["kl_placement='both'", "'loss', 'reward'", "Set kl_placement"]),
    ({"kl_placement": "reward"}, ["kl_placement='reward'", "beta=0.0", "Set beta > 0"]),
    ({"overlap_rollout": True}, ["overlap_rollout=True", "use_vllm=False", "Set use_vllm=True"]),
    ({"max_sync_logprob_gap": 0}, ["max_sync_logprob_gap=0", "> 0", "0.05"]),
    ({"vllm_server_urls": ["http://a:1"]}, ["vllm_server_urls=['http://a:1']", "use_vllm=False", "Set use_vllm=True"]),
    (
        {"vllm_server_urls": ["a:1"], "use_vllm": True, "vllm_mode": "server"},
        ["vllm_server_urls=['a:1']", "no URL", "http://127.0.0.1:8000"],
    ),
    ({"use_vllm": True, "top_k": 5}, ["top_k=5", "importance sampling", "Remove top_k"]),
    (
        {"mask_truncated_completions": True, "truncated_trajectories": "penalise"},
        ["mask_truncated_completions=True", "truncated_trajectories='penalise'", "Remove one"],
    ),
]
GRPO = [
    ({"advantage_estimator": "gae"}, ["advantage_estimator='gae'", "critic", "MultiTurnPPOTrainer"]),
    ({"num_generations": 1}, ["num_generations=1", "group", "Set num_generations >= 2"]),
    (
        {"advantage_estimator": "dr_grpo", "loss_type": "grpo"},
        ["loss_type='grpo'", "contradicts advantage_estimator='dr_grpo'", "Remove loss_type"],
    ),
    (
        {"advantage_estimator": "rloo", "scale_rewards": "batch"},
        ["scale_rewards='batch'", "no meaning with advantage_estimator='rloo'", "Remove scale_rewards"],
    ),
]
PPO = [
    ({"advantage_estimator": "grpo"}, ["advantage_estimator='grpo'", "without a critic", "MultiTurnGRPOTrainer"]),
    ({"critic": "heads"}, ["critic='heads'", "'adapter', 'head', 'model'", "Set critic"]),
    ({"critic": "head", "critic_context": "answer"}, ["critic_context='answer'", "critic='head'", "Set critic='ad"]),
    ({"cliprange_value": 0}, ["cliprange_value=0", "positive", "0.2"]),
    ({"lam": 2}, ["lam=2", "between 0 and 1", "Set lam"]),
    ({"value_loss_coef": -1}, ["value_loss_coef=-1", ">= 0", "Set value_loss_coef"]),
    ({"loss_mask": False}, ["loss_mask=False", "advantage_mask=True", "Set advantage_mask=False"]),
    ({"use_liger_kernel": True}, ["use_liger_kernel=True", "critic", "Set use_liger_kernel=False"]),
    ({"separate_process_advantages": True}, ["separate_process_advantages=True", "gae", "Set separate"]),
]  # fmt: skip
CASES = [
    *((MultiTurnGRPOConfig, *case) for case in [*CONFIG, *GRPO]),
    *((MultiTurnPPOConfig, *case) for case in [*CONFIG, *PPO]),
]


@pytest.mark.parametrize(
    ("config_class", "settings", "parts"),
    [pytest.param(*case, id=f"{case[0].__name__[9:-6]}-{case[2][0]}") for case in CASES],
)
def test_a_setting_that_cannot_hold_is_refused(config_class, settings, parts, tmp_path):
    with pytest.raises(ValueError) as error:
        config_class(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **settings})
    assert missing(parts, str(error.value)) == [], str(error.value)


# ---------------------------------------------------------------- tools


def no_docstring(query: str) -> str:
    return query


def no_hint(query) -> str:
    """Search.

    Args:
        query: The words.
    """
    return query


def no_description(query: str, k: int) -> str:
    """Search.

    Args:
        query: The words.
    """
    return query * k


def bad_default(query: str, k: int = "three") -> str:  # type: ignore[assignment]
    """Search.

    Args:
        query: The words.
        k: How many.
    """
    return query * int(k)


def any_number(*queries: str) -> str:
    """Search.

    Args:
        queries: The words.
    """
    return " ".join(queries)


TOOLS = {
    no_docstring: ["'no_docstring'", "no docstring", "write"],
    no_hint: ["'no_hint'", "'query' has no type hint", "write 'query: str'"],
    no_description: ["'no_description'", "no description for the argument 'k'", "Args:"],
    bad_default: ["'bad_default'", "k='three'", "not of type 'integer'", "correct the default"],
    any_number: ["'any_number'", "*queries", "give every argument a name"],
}


@pytest.mark.parametrize(("function", "parts"), TOOLS.items(), ids=[item.__name__ for item in TOOLS])
def test_a_tool_that_no_model_can_read_is_refused(function, parts):
    with pytest.raises(ToolSchemaError) as error:
        _ = tool(function).schema
    assert missing(parts, str(error.value)) == [], str(error.value)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: tool(no_hint, timeout_s=-1), ["timeout_s=-1", "> 0", "None"]),
        (lambda: tool(no_hint, name="two words"), ["'two words'", "1 to 64 of the characters", "pass name=..."]),
        (lambda: tool("search"), ["'search'", "@tool(timeout_s=5)"]),
        (lambda: tool(tool(no_hint)), ["'no_hint'", "twice", "keep one @tool"]),
    ],
)
def test_a_tool_setting_that_cannot_hold_is_refused(make, parts):
    with pytest.raises(ValueError) as error:
        make()
    assert missing(parts, str(error.value)) == [], str(error.value)


# ---------------------------------------------------------------- environments in code


class Env(ToolEnv):
    """Good."""

    def outcome_reward(self, trajectory):
        return exact_match(trajectory.final_text, "Oslo")


class NeedsArgument(Env):
    def __init__(self, path):
        super().__init__()


ENVS = {
    "an instance": (Env(), ["env=Env instance", "every trajectory needs its own", "Pass env=Env"]),
    "an argument": (NeedsArgument, ["env=NeedsArgument", "path", "functools.partial(NeedsArgument, ...)"]),
    "a number": (5, ["env=int", "every trajectory needs its own", "Pass env="]),
}


def make_trainer(folder, **arguments):
    args = MultiTurnGRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, num_generations=2, per_device_train_batch_size=2,
        report_to="none", gradient_checkpointing=False,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "Capital of Norway?"}] * 2)
    return MultiTurnGRPOTrainer(model="is not loaded", args=args, **{"train_dataset": data, **arguments})


@pytest.mark.parametrize(("env", "parts"), ENVS.values(), ids=ENVS.keys())
def test_what_is_no_factory_of_environments_is_refused(env, parts, tmp_path):
    with pytest.raises(ValueError) as error:
        make_trainer(tmp_path, env=env)
    assert missing(parts, str(error.value)) == [], str(error.value)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"env": Env, "tools": [no_hint]}, ["env=", "tools=", "remove tools="]),
        ({"tools": [no_hint]}, ["No reward source", "tools=", "Pass reward_funcs="]),
        ({"env": Env, "rollout_func": print}, ["rollout_func=", "env=", "Remove one"]),
        (
            {"env": Env, "train_dataset": Dataset.from_list([])},
            ["train_dataset has 0 rows", "takes 1", "Pass more rows"],
        ),
        ({"env": Env, "train_dataset": None}, ["max_steps=-1", "own prompts", "set max_steps > 0"]),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, parts, tmp_path):
    with pytest.raises(ValueError) as error:
        make_trainer(tmp_path, **arguments)
    assert missing(parts, str(error.value)) == [], str(error.value)
