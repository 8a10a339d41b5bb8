"""The settings that are the command line's own; all others are TRL's and the trainer's.

The same names in a recipe and on the command line. A recipe that trains also evaluates: `eval` and `doctor` read the
settings they share and pass over the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.objects import did_you_mean

TRAINERS = {"grpo": "MultiTurnGRPOTrainer", "ppo": "MultiTurnPPOTrainer"}
"""Value of `trainer` -> class in `agent_r1_trl.trainers`; its `config_class` reads the settings."""
DTYPES = ["auto", "bfloat16", "float16", "float32"]
"""What TRL's `ModelConfig` takes."""

_ENV_HELP = (
    "What the agent acts in: 'search_qa', or the import path of an Environment class or of a function that makes one "
    "(my_module.MyEnv, or envs/my_env.py:MyEnv)."
)


@dataclass
class TaskArguments:
    """Environment and data."""

    env: str | None = field(default=None, metadata={"help": _ENV_HELP})
    env_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the environment; on the command line as '{top_k: 3}'."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set from the Hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on (Hub data sets)."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on (Hub data sets)."})

    def __post_init__(self) -> None:
        self.env_kwargs = read_mapping("env_kwargs", self.env_kwargs)


@dataclass
class TrainArguments(TaskArguments):
    """What `train` needs besides the trainer's configuration and the model's."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Data set to train on: a .jsonl, .json, .csv or .parquet file, a directory, or a Hub id. None: "
            "the environment makes its own tasks.",
            "aliases": ["--dataset"],
        },
    )
    eval_dataset_name: str | None = field(default=None, metadata={"help": "Data set for evaluation during training."})
    num_eval_examples: int | None = field(
        default=None, metadata={"help": "Only the first rows of the evaluation data set."}
    )
    trainer: str = field(default="grpo", metadata={"help": "Algorithm: 'grpo' or 'ppo'.", "aliases": ["--algo"]})
    tools: list[str] | None = field(
        default=None, metadata={"help": "Instead of env: import paths of functions (then reward_funcs must score)."}
    )
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Import paths of reward functions, beside the environment's own reward."}
    )
    turn_reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Import paths of functions that return one reward per turn."}
    )
    num_processes_expected: int | None = field(
        default=None, metadata={"help": "Processes this recipe is made for; any other number is refused. None: any."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trainer(self.trainer)
        check_positive("num_processes_expected", self.num_processes_expected)
        check_env_or_tools(self.env, self.tools)
        if not (self.env or self.tools or self.reward_funcs or self.turn_reward_funcs):
            raise UsageError(f"env: not set, so there is nothing to act in. Set env. {_ENV_HELP}")


@dataclass
class EvalArguments(TaskArguments):
    """What `eval` reads; lengths and limits as in training."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model or PEFT adapter: a directory or a Hub id.", "aliases": ["--model"]}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "A recipe's training data, used if eval_dataset_name is not set."}
    )
    eval_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Data set: a .jsonl, .json, .csv or .parquet file, a directory, or a Hub id.",
            "aliases": ["--dataset"],
        },
    )
    num_examples: int | None = field(default=None, metadata={"help": "Only the first rows of the data set."})
    num_generations_eval: int = field(
        default=1, metadata={"help": "Attempts per example.", "aliases": ["--num_generations"]}
    )
    eval_temperature: float = field(default=0.0, metadata={"help": "0 is greedy.", "aliases": ["--temperature"]})
    seed: int = field(default=42, metadata={"help": "Of sampling, environments and bootstrap."})
    output_dir: str | None = field(
        default=None, metadata={"help": "Where evaluation.json and the trajectories go. None: only the table."}
    )
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM in this process."})
    dtype: str | None = field(
        default=None,
        metadata={"help": "None: the checkpoint's own on a GPU, float32 on a CPU.", "choices": DTYPES},
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    max_turns: int = field(default=8, metadata={"help": "Assistant turns per trajectory."})
    max_tokens_per_turn: int | None = field(default=None, metadata={"help": "Tokens sampled in one turn."})
    max_completion_length: int = field(
        default=512, metadata={"help": "Tokens of the whole trajectory, tool text included."}
    )
    max_observation_tokens: int = field(default=1024, metadata={"help": "Tokens of observation text after one turn."})
    max_invalid_calls: int = field(default=2, metadata={"help": "Unusable turns in a row."})
    max_concurrency: int = field(default=256, metadata={"help": "Trajectories in flight at once."})
    rollout_timeout: float | None = field(default=None, metadata={"help": "Seconds per trajectory."})
    generation_batch_rows: int = field(default=64, metadata={"help": "Requests per forward (transformers)."})
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Handed to the chat template."}
    )
    thinking: str = field(default="keep", metadata={"help": "Reasoning of earlier turns.", "choices": ["keep", "off"]})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = read_mapping("chat_template_kwargs", self.chat_template_kwargs)
        if not self.env:
            raise UsageError(f"env: not set, so there is nothing to act in. Set env. {_ENV_HELP}")
        check_positive("num_examples", self.num_examples)
        check_positive("num_generations_eval", self.num_generations_eval)
        check_positive("generation_batch_rows", self.generation_batch_rows)
        if not self.eval_temperature >= 0:
            raise UsageError(
                f"eval_temperature={self.eval_temperature}: must be >= 0. Set eval_temperature to 0 (greedy) or more."
            )


@dataclass
class DoctorArguments(TaskArguments):
    """What `doctor` reads."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model: a directory or a Hub id.", "aliases": ["--model"]}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set whose first rows are played.", "aliases": ["--dataset"]}
    )
    tools: list[str] | None = field(default=None, metadata={"help": "Instead of env: import paths of functions."})
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Tokens of the whole trajectory: do prompts leave room for them?"}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Handed to the chat template."}
    )
    thinking: str = field(default="keep", metadata={"help": "Reasoning of earlier turns.", "choices": ["keep", "off"]})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = read_mapping("chat_template_kwargs", self.chat_template_kwargs)
        check_env_or_tools(self.env, self.tools)
        check_positive("max_completion_length", self.max_completion_length)


@dataclass
class MemoryArguments:
    """What `memory` reads of a recipe, with the trainers' defaults, and what it asks for itself."""

    accelerate_config: str | None = field(
        default=None, metadata={"help": "File of recipes/accelerate_configs. None: one process."}
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "GPUs that train together. None: as accelerate_config says, else 1."}
    )
    gpu_memory_gb: float | None = field(
        default=None, metadata={"help": "GiB of one GPU. None: of the one in this machine, else 80."}
    )
    prompt_tokens: int = field(default=512, metadata={"help": "Tokens of the longest prompt."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})

    trainer: str = field(default="grpo", metadata={"help": "Algorithm: 'grpo' or 'ppo'.", "aliases": ["--algo"]})
    critic: str | None = field(default=None, metadata={"help": "PPO's: 'adapter', 'head' or 'model'."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Trajectories in one forward."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Forwards per optimizer step."})
    steps_per_generation: int | None = field(
        default=None, metadata={"help": "Forwards per rollout. None: gradient_accumulation_steps."}
    )
    max_completion_length: int = field(default=512, metadata={"help": "Tokens of the whole trajectory."})
    gradient_checkpointing: bool = field(default=True, metadata={"help": "Recompute layers in the backward."})
    bf16: bool | None = field(default=None, metadata={"help": "None: true unless fp16 is."})
    fp16: bool = field(default=False, metadata={"help": "Products in float16."})
    beta: float = field(default=0.0, metadata={"help": "Not 0, without LoRA: a reference model."})
    optim: str = field(default="adamw_torch_fused", metadata={"help": "An AdamW; 8-bit ones have small states."})
    use_vllm: bool = field(default=False, metadata={"help": "Generate with vLLM."})
    vllm_mode: str = field(
        default="colocate",
        metadata={
            "help": "'colocate': on the GPUs that train; 'server': on GPUs of its own.",
            "choices": ["colocate", "server"],
        },
    )
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata={"help": "Part of the GPU for vLLM."})
    vllm_enable_sleep_mode: bool = field(default=False, metadata={"help": "vLLM rests during the update."})
    generation_batch_rows: int = field(default=64, metadata={"help": "Requests per forward (transformers)."})

    def __post_init__(self) -> None:
        check_trainer(self.trainer)
        for name in ("num_processes", "per_device_train_batch_size", "gradient_accumulation_steps"):
            check_positive(name, getattr(self, name))
        if "adam" not in self.optim:
            raise UsageError(f"optim={self.optim!r}: the estimate knows Adam's states only. Pass --optim adamw_torch.")


def check_trainer(name: str) -> None:
    """Refuse an algorithm that does not exist.

    Raises:
        UsageError: names those that do.
    """
    if name in TRAINERS:
        return
    known = ", ".join(map(repr, TRAINERS))
    raise UsageError(f"trainer={name!r} is none of {known}.{did_you_mean(name, TRAINERS)} Set trainer to one of them.")


def check_env_or_tools(env: str | None, tools: list[str] | None) -> None:
    """Refuse both at once.

    Raises:
        UsageError: names both.
    """
    if env and tools:
        raise UsageError(f"env={env!r} and tools={tools!r}: an environment brings its own tools. Remove one of them.")


def check_positive(name: str, value: int | None) -> None:
    """Refuse numbers below 1; None passes.

    Raises:
        UsageError: names flag, value and rule.
    """
    if value is not None and value < 1:
        raise UsageError(f"{name}={value}: must be a whole number >= 1. Set {name} to such a number.")


def read_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A mapping, or the YAML (or JSON) text of one.

    Raises:
        UsageError: the text is something else.
    """
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            value = value or None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}={value!r}: must be a mapping of names to values, such as '{{top_k: 3}}'.")
    return value
