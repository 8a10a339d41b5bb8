"""The settings of the command line itself; all others belong to TRL and to the trainers.

A setting has the same name in a recipe and on the command line. One recipe serves `train`, `eval`, `doctor` and
`memory`: each command reads the settings that it knows and ignores those of the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import yaml

from agent_r1_trl.cli.endpoint_settings import EndpointSettings
from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.eval_settings import TableSettings
from agent_r1_trl.cli.eval_trackers import check_trackers
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.rollout.limits import RolloutSettings, check_whole_number
from agent_r1_trl.safe_text import SECRET_NAMES, SECRET_NAMES_HELP, SECRET_PATTERNS_HELP, check_rules

TRAINERS = {"grpo": "MultiTurnGRPOTrainer", "ppo": "MultiTurnPPOTrainer"}
"""Value of `trainer` -> class in `agent_r1_trl.trainers`, whose `config_class` defines the settings."""
DTYPES = ["auto", "bfloat16", "float16", "float32"]
"""The choices of `dtype` in TRL's `ModelConfig`."""

_ENV_HELP = (
    "Environment: 'search_qa', 'bandit', 'frozen_lake', 'sokoban', 'countdown', 'reasoning_gym', or the import path "
    "of an Environment class or of a function that returns one (my_module.MyEnv or envs/my_env.py:MyEnv)."
)


@dataclass
class TaskArguments:
    """Environment and data."""

    env: str | None = field(default=None, metadata={"help": _ENV_HELP})
    env_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Arguments of the environment, on the command line as '{top_k: 3}'; those of the recipe that are "
            "not named there stay."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the Hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on, for Hub data sets."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on, for Hub data sets."})

    def __post_init__(self) -> None:
        self.env_kwargs = read_mapping("env_kwargs", self.env_kwargs)


@dataclass
class TrainArguments(TaskArguments):
    """Settings of `train` beside those of the trainer and of the model."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Data set to train on: a .jsonl, .json, .csv or .parquet file, a directory, or a Hub id. None: "
            "the environment makes its own prompts.",
            "aliases": ["--dataset"],
        },
    )
    eval_dataset_name: str | None = field(default=None, metadata={"help": "Data set to evaluate on during training."})
    num_eval_examples: int | None = field(
        default=None, metadata={"help": "Number of rows of the evaluation data set to use. None: all."}
    )
    trainer: str = field(default="grpo", metadata={"help": "Algorithm: 'grpo' or 'ppo'.", "aliases": ["--algo"]})
    tools: list[str] | None = field(
        default=None, metadata={"help": "Instead of env: import paths of functions. Requires reward_funcs."}
    )
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Import paths of reward functions, added to the environment's own reward."}
    )
    turn_reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Import paths of functions that return one reward for each turn."}
    )
    reward_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of reward functions by the name of the function, on the command line as "
            "'{overlong_penalty: {max_tokens: 900}}'; the recipe's for other functions stay."
        },
    )
    num_processes_expected: int | None = field(
        default=None,
        metadata={
            "help": "Number of processes that this recipe was written for; any other is refused. None: any number."
        },
    )

    overwrite: bool = field(
        default=False,
        metadata={
            "help": "Start a new run in an output_dir that holds one: the old run's folder is moved to output_dir.1 "
            "(.2, ...), and nothing is deleted. Off: such a folder is refused."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward_options = read_mapping("reward_options", self.reward_options)
        check_trainer(self.trainer)
        check_positive("num_processes_expected", self.num_processes_expected)
        check_positive("num_eval_examples", self.num_eval_examples)
        check_env_or_tools(self.env, self.tools)
        if not (self.env or self.tools or self.reward_funcs or self.turn_reward_funcs):
            raise UsageError(f"env: not set, so the agent has nothing to act in. Set env. {_ENV_HELP}")


@dataclass
class EvalArguments(RolloutSettings, TaskArguments, TableSettings, EndpointSettings):
    """Settings of `eval`; the limits of a trajectory are those of training."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Training data of the recipe, used if eval_dataset_name is not set."}
    )
    num_examples: int | None = field(default=None, metadata={"help": "Number of rows to use. None: all."})
    num_generations_eval: int = field(
        default=1, metadata={"help": "Attempts per example.", "aliases": ["--num_generations"]}
    )
    retry_failed: int = field(
        default=0, metadata={"help": "How often a trajectory that failed for no fault of the policy is played again."}
    )
    eval_temperature: float = field(
        default=0.0, metadata={"help": "Temperature; 0 is greedy.", "aliases": ["--temperature"]}
    )
    seed: int = field(default=42, metadata={"help": "Seed of sampling, environments and bootstrap intervals."})
    output_dir: str | None = field(
        default=None,
        metadata={
            "help": "Directory for the table (evaluation.json, .md, .csv), trajectories and journal. Not set: "
            "only print the table."
        },
    )
    journal: bool = field(
        default=True, metadata={"help": "Keep every turn in output_dir/journal, for replay. Needs output_dir."}
    )
    replay: str | None = field(
        default=None,
        metadata={
            "help": "Take the trajectories from the journal of another evaluation (its output_dir) instead of playing "
            "them: no model, no tools, no environment."
        },
    )
    use_vllm: bool = field(default=False, metadata={"help": "Generate with vLLM, in this process."})
    dtype: str | None = field(
        default=None, metadata={"help": "None: that of the checkpoint on a GPU, float32 on a CPU.", "choices": DTYPES}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow code that comes with the model to run."})
    max_completion_length: int | None = field(  # the default is TRL's
        default=512, metadata=RolloutSettings.__dataclass_fields__["max_completion_length"].metadata
    )
    generation_batch_rows: int = field(
        default=64, metadata={"help": "Maximum number of requests per forward pass of the transformers generator."}
    )
    secret_names: str = field(default=SECRET_NAMES, metadata={"help": SECRET_NAMES_HELP})
    secret_patterns: list[str] | None = field(default=None, metadata={"help": SECRET_PATTERNS_HELP})
    chat_template: str | None = field(
        default=None, metadata={"help": "Chat template in place of the tokenizer's: source, file or TRL's name."}
    )
    response_template: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Grammar that reads tool calls: a family's name, or a JSON file."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the chat template."}
    )
    thinking: str = field(
        default="keep",
        metadata={"help": "Earlier turns' reasoning, kept or not; 'off': none.", "choices": ["keep", "off", "strip"]},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_name_or_path = [name for name in self.model_name_or_path or () if name] or None
        self.chat_template_kwargs = read_mapping("chat_template_kwargs", self.chat_template_kwargs)
        if not self.env:
            raise UsageError(f"env: not set, so the agent has nothing to act in. Set env. {_ENV_HELP}")
        self.check_limits()
        self.check_table()
        self.report_to = check_trackers(self.report_to, self.output_dir)
        self.check_endpoint(read_mapping("endpoint_options", self.endpoint_options))
        check_rules(self.secret_names, self.secret_patterns)
        check_positive("num_examples", self.num_examples)
        check_positive("num_generations_eval", self.num_generations_eval)
        check_whole_number("retry_failed", self.retry_failed, minimum=0)
        check_positive("generation_batch_rows", self.generation_batch_rows)
        if not self.eval_temperature >= 0:
            raise UsageError(
                f"eval_temperature={self.eval_temperature}: must be >= 0. Set eval_temperature to 0 (greedy) or more."
            )


_EVAL = EvalArguments.__dataclass_fields__


@dataclass
class DoctorArguments(TaskArguments):
    """Settings of `doctor`."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model: a directory or a Hub id.", "aliases": ["--model"]}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set; episodes are played on its first rows.", "aliases": ["--dataset"]}
    )
    tools: list[str] | None = field(default=None, metadata={"help": "Instead of env: import paths of functions."})
    trust_remote_code: bool = field(default=False, metadata=_EVAL["trust_remote_code"].metadata)
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Tokens of the whole trajectory; prompts must leave room for them."}
    )
    chat_template: str | None = field(default=None, metadata=_EVAL["chat_template"].metadata)
    response_template: dict[str, Any] | str | None = field(default=None, metadata=_EVAL["response_template"].metadata)
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=_EVAL["chat_template_kwargs"].metadata
    )
    thinking: str = field(default="keep", metadata=_EVAL["thinking"].metadata)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = read_mapping("chat_template_kwargs", self.chat_template_kwargs)
        check_env_or_tools(self.env, self.tools)
        check_positive("max_completion_length", self.max_completion_length)


@dataclass
class TrialArguments:
    """Settings of `doctor --run` beside those of `train`."""

    run: bool = field(
        default=False,
        metadata={"help": "Train two real steps of the recipe, in a temporary folder, and say what they took."},
    )
    run_tokens: int = field(
        default=512, metadata={"help": "With --run: tokens of a trajectory after the prompt, at most the recipe's."}
    )
    run_turns: int = field(
        default=4, metadata={"help": "With --run: turns of a trajectory, at most the recipe's max_turns."}
    )

    def __post_init__(self) -> None:
        check_positive("run_tokens", self.run_tokens)
        check_positive("run_turns", self.run_turns)


def _limit(name: str) -> Any:
    """A field of `RolloutSettings`, for a command that reads only some of them."""
    item = RolloutSettings.__dataclass_fields__[name]
    return field(default=item.default, metadata=item.metadata)


@dataclass
class MemoryArguments:
    """Settings of `memory`: its own, and those of a recipe on which memory depends, with the trainers' defaults."""

    accelerate_config: str | None = field(
        default=None, metadata={"help": "A file of recipes/accelerate_configs. None: one process."}
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "GPUs that train together. None: as in accelerate_config, else 1."}
    )
    gpu_memory_gb: float | None = field(
        default=None, metadata={"help": "Memory of one GPU in GiB. None: that of the GPU in this machine, else 80."}
    )
    prompt_tokens: int = field(default=512, metadata={"help": "Length of the longest prompt in tokens."})
    critic_context_tokens: int = field(
        default=64, metadata={"help": "Length of the longest `critic_context` in tokens, where the recipe names one."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow code that comes with the model to run."})

    trainer: str = field(default="grpo", metadata={"help": "Algorithm: 'grpo' or 'ppo'.", "aliases": ["--algo"]})
    critic: str | None = field(default=None, metadata={"help": "Critic of PPO: 'adapter', 'head' or 'model'."})
    critic_context: str | None = field(
        default=None, metadata={"help": "Column of the data set that PPO's critic reads before each row."}
    )
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Trajectories per forward pass."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Forward passes per optimizer step."})
    steps_per_generation: int | None = field(
        default=None, metadata={"help": "Forward passes per rollout. None: gradient_accumulation_steps."}
    )
    prompts_per_rollout: int | None = field(
        default=None, metadata={"help": "Prompts of one rollout, instead of steps_per_generation."}
    )
    updates_per_rollout: int | None = field(default=None, metadata={"help": "Optimizer steps on one rollout."})
    num_generations: int | None = field(
        default=None, metadata={"help": "Trajectories per prompt. None: 8, and 1 for PPO."}
    )
    max_completion_length: int = field(default=512, metadata={"help": "Tokens of the whole trajectory."})
    max_turns: int = _limit("max_turns")
    max_tokens_per_turn: int | None = _limit("max_tokens_per_turn")
    max_observation_tokens: int = _limit("max_observation_tokens")
    thinking: str = field(default="keep", metadata={"help": "'strip' is the context policy 'strip_thinking'."})
    context_policy: str = _limit("context_policy")
    context_turns: int | None = _limit("context_turns")
    context_tokens: int | None = _limit("context_tokens")
    summary_tokens: int | None = _limit("summary_tokens")
    update_layout: str = field(
        default="padded",
        metadata={
            "help": "How rows are laid out in a forward pass.",
            "choices": ["padded", "grouped", "packed", "shared"],
        },
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None, metadata={"help": "Tokens of a forward pass, in place of per_device_train_batch_size rows."}
    )
    gradient_checkpointing: bool = field(default=True, metadata={"help": "Recompute the layers in the backward pass."})
    bf16: bool | None = field(default=None, metadata={"help": "Compute in bfloat16. None: true unless fp16 is set."})
    fp16: bool = field(default=False, metadata={"help": "Compute in float16."})
    beta: float = field(default=0.0, metadata={"help": "KL coefficient; not 0: a reference model, except under LoRA."})
    optim: str = field(
        default="adamw_torch_fused", metadata={"help": "Optimizer, one of the AdamWs; 8-bit ones have small states."}
    )
    use_vllm: bool = field(default=False, metadata={"help": "Generate with vLLM."})
    vllm_mode: str = field(
        default="colocate",
        metadata={
            "help": "'colocate': on the training GPUs; 'server': on GPUs of its own.",
            "choices": ["colocate", "server"],
        },
    )
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata={"help": "Share of the GPU's memory for vLLM."})
    vllm_enable_sleep_mode: bool = field(default=False, metadata={"help": "vLLM frees its memory during the update."})
    generation_batch_rows: int = field(
        default=64, metadata={"help": "Maximum number of requests per forward pass of the transformers generator."}
    )

    def __post_init__(self) -> None:
        check_trainer(self.trainer)
        for name in (
            "num_processes", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
            "prompts_per_rollout", "updates_per_rollout", "num_generations", "generation_batch_rows", "prompt_tokens",
            "critic_context_tokens", "max_tokens_per_micro_batch",
        ):  # fmt: skip
            check_positive(name, getattr(self, name))
        if "adam" not in self.optim:
            raise UsageError(f"optim={self.optim!r}: only the states of Adam are estimated. Pass --optim adamw_torch.")


def check_trainer(name: str) -> None:
    """Refuse an unknown algorithm.

    Raises:
        UsageError: names the known ones.
    """
    if name in TRAINERS:
        return
    known = ", ".join(map(repr, TRAINERS))
    raise UsageError(
        f"trainer={name!r} must be one of {known}.{did_you_mean(name, TRAINERS)} Set trainer to one of them."
    )


def check_env_or_tools(env: str | None, tools: list[str] | None) -> None:
    """Refuse an environment together with tools.

    Raises:
        UsageError: both are given.
    """
    if env and tools:
        raise UsageError(f"env={env!r} and tools={tools!r}: an environment brings its own tools. Remove one of them.")


def check_positive(name: str, value: int | None) -> None:
    """Refuse numbers below 1; None is allowed.

    Raises:
        UsageError: the number is below 1.
    """
    if value is not None and value < 1:
        raise UsageError(f"{name}={value}: must be a whole number >= 1. Set {name} to such a number.")


def read_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Read a mapping from a value that is one or is the YAML or JSON text of one.

    Raises:
        UsageError: the value is something else.
    """
    if isinstance(value, str):
        value = _read_text(value)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}={value!r}: must be a mapping. Set it to names with values, such as '{{top_k: 3}}'.")
    return value


def _read_text(text: str) -> Any:
    """What a text of JSON or YAML holds; the text itself if it is neither. YAML alone would read 1e-05 as a text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text or None
