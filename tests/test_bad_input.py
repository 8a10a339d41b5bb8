"""What a user gets wrong in code is refused with the flag, its value and a fix.

Covered: both configurations, environments and arguments of the trainers. Not covered: the commands
(tests/cli), tools (tests/tools), what a model gets wrong (tests/rollout).
"""

from __future__ import annotations

import math
import re

import pytest
from datasets import Dataset

from agent_r1_trl import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig, ToolEnv
from agent_r1_trl.rewards import exact_match
from agent_r1_trl.tools import calculator
from tests.trainers.helpers import unfold

FIX = re.compile(
    r"\b([Ss]et|[Pp]ass|[Rr]emove|[Ww]rite|[Uu]se|[Gg]ive|[Kk]eep|[Rr]ename|[Cc]orrect|Name|add|Fix|or None)\b"
)


def assert_refused(make, *names):
    """`make()` raises a ValueError that names all of `names` and says what to do."""
    with pytest.raises(ValueError) as error:
        make()
    message = str(error.value)
    assert [name for name in names if name not in message] == [], message
    assert FIX.search(message), f"no fix in: {message}"


# ---------------------------------------------------------------- configuration

# What single settings take: tests/test_settings.py; what each cannot mean beside others: trainers/test_every_field.py.
# Here the first setting of a row is named with its value, and the names behind the row are in the message too.
CONFIG = [
    ({"advantage_estimator": "a2c"},),
    ({"advantage_estimator": 3},),
    ({"temperature": 1e300, "max_turns": 3},),
    ({"temperature": 1e-320, "max_turns": 3},),
    ({"advantage_estimator": "no_such_module.fn"},),
    ({"servers.urls": ["a:1"], "use_vllm": True, "vllm_mode": "server"}, "http://"),
    ({"servers.urls": ["http://a:1", "http://a:1/"], "use_vllm": True, "vllm_mode": "server"}, "once"),
    ({"servers.urls_file": "/", "use_vllm": True, "vllm_mode": "server"}, "Is a directory", "one URL a line"),
]
INHERITED = [
    ("learning_rate", -1e-3, math.inf, math.nan, 1e300), ("weight_decay", -1, 1e300),
    ("adam_beta1", 1.5), ("adam_beta2", 1.0), ("adam_epsilon", -1),
    ("max_grad_norm", -1), ("beta", -1), ("epsilon", -0.2), ("epsilon_high", -0.1),
    ("per_device_train_batch_size", 0), ("per_device_eval_batch_size", 0), ("gradient_accumulation_steps", 0),
    ("num_iterations", 0), ("save_steps", 0, -1), ("eval_steps", 0), ("logging_steps", 0), ("save_total_limit", 0),
    ("scale_rewards", "grupo"), ("reward_weights", [math.nan], []), ("dataloader_num_workers", -1),
    ("output_dir", "", " "), ("top_entropy_quantile", 1.5), ("ddp_timeout", 0), ("torch_compile_mode", "fastest"),
    ("seed", -1, 2**32), ("data_seed", -1), ("warmup_steps", -3),
]  # fmt: skip
"""Settings of transformers and TRL with values of which nobody said a word, or only a traceback."""
LATE = [
    ({"optim": "adamw_8bit"}, "bitsandbytes"),
    ({"optim": "galore_adamw"}, "galore_torch"),
]
LATE_OPTIONS = [
    ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config={'dispatch_batches': True}: "),
    (
        {"lr_scheduler_kwargs": {"num_cycle": 3}, "lr_scheduler_type": "cosine_with_restarts"},
        "lr_scheduler_kwargs: 'num_cycle'", "mean 'num_cycles'",
    ),
    (
        {"gradient_checkpointing_kwargs": {"use_reentrnt": False}},
        "gradient_checkpointing_kwargs: 'use_reentrnt'", "mean 'use_reentrant'",
    ),
]  # fmt: skip
GRPO = [
    ({"advantage_estimator": "gae"}, "MultiTurnPPOTrainer"),
    ({"loss_type": "ppo"}, "'bnpo', 'cispo'"),
]
PPO = [
    ({"advantage_estimator": "grpo"}, "MultiTurnGRPOTrainer"),
    ({"max_grad_norm": None},),
    ({"critic_learning_rate": 1e300},),
]
CASES = [
    *((MultiTurnGRPOConfig, *case) for case in [*CONFIG, *GRPO]),
    *((MultiTurnPPOConfig, *case) for case in [*CONFIG, *PPO]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__[9:-6]}-{next(iter(case[1].items()))}")
def test_a_setting_that_cannot_hold_is_refused(case, tmp_path):
    config_class, settings, *names = case
    name, value = next(iter(settings.items()))
    settings = unfold({"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **settings})
    assert_refused(lambda: config_class(**settings).check_supported(), f"{name}={value!r}", *names)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, *values in INHERITED for value in values])
def test_a_value_that_transformers_and_trl_do_not_look_at_is_refused(name, value, tmp_path):
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, name: value}
    assert_refused(lambda: MultiTurnGRPOConfig(**settings), f"{name}={value!r} must be")


@pytest.mark.parametrize(("settings", "names"), [(settings, names) for settings, *names in [*LATE, *LATE_OPTIONS]])
def test_what_would_be_found_when_the_model_is_loaded_is_refused_before(settings, names, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **settings}
    named = [f"{name}={value!r}" for name, value in settings.items()] if (settings, *names) in LATE else []
    assert_refused(lambda: MultiTurnGRPOConfig(**made), *named, *names)


# ---------------------------------------------------------------- environments in code


class Env(ToolEnv):
    """Good."""

    def outcome_reward(self, trajectory):
        return exact_match(trajectory.final_text, "Oslo")


class NeedsArgument(Env):
    def __init__(self, path):
        super().__init__()


def make_trainer(folder, **arguments):
    args = MultiTurnGRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, num_generations=2, per_device_train_batch_size=2,
        report_to="none", gradient_checkpointing=False,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "Capital of Norway?"}] * 2)
    return MultiTurnGRPOTrainer(**{"model": "is not loaded", "args": args, "train_dataset": data, **arguments})


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (Env(), "an instance"),
        (NeedsArgument, "env=NeedsArgument"),
        (5, "env=5 is an instance"),
        ("my.Env", "env='my.Env' is a text"),
    ],
)
def test_what_is_no_factory_of_environments_is_refused(env, name, tmp_path):
    assert_refused(lambda: make_trainer(tmp_path, env=env), name)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"env": Env, "tools": [calculator]}, ["env=", "tools="]),
        ({"tools": [calculator]}, ["tools=", "reward_funcs="]),
        ({"env": Env, "environment_factory": Env}, ["env=", "environment_factory="]),
        ({"env": Env, "rollout_func": print}, ["rollout_func=", "env="]),
        ({"env": Env, "train_dataset": Dataset.from_list([])}, ["train_dataset", " 0 "]),
        ({"env": Env, "train_dataset": None}, ["max_steps=-1"]),
        ({"env": Env, "reward_funcs": [1.5]}, ["reward_funcs=1.5", "a function"]),
        (
            {"env": Env, "reward_funcs": "exact_match"},
            ["reward_funcs='exact_match'", "agent_r1_trl.rewards.exact_match"],
        ),
        ({"env": Env, "model": None}, ["model=None"]),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, names, tmp_path):
    assert_refused(lambda: make_trainer(tmp_path, **arguments), *names)


def test_an_argument_that_no_trainer_has_is_refused_with_the_one_that_was_meant(tmp_path):
    expected = "MultiTurnGRPOTrainer has no argument 'turn_reward_func'. Did you mean 'turn_reward_funcs'?"
    with pytest.raises(TypeError, match=re.escape(expected)):
        make_trainer(tmp_path, env=Env, turn_reward_func=[])
