"""The settings of the command line itself; all others belong to TRL and to the trainers.

A setting has the same name in a recipe and on the command line. One recipe serves `train`, `eval`, `doctor` and
`memory`: each command reads the settings that it knows and ignores those of the others. What a setting takes stands in
its annotation, what settings say together in the tables of their class.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import yaml

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.options import HelpPage
from agent_r1_trl.features import feature, mappings_of
from agent_r1_trl.generation.endpoint import api_url
from agent_r1_trl.rollout.limits import RolloutSettings, find_limit_problems
from agent_r1_trl.safe_text import SECRETS_HELP, SecretMapping, rules
from agent_r1_trl.settings import (
    Clash,
    Count,
    CountOrZero,
    Need,
    NotNegative,
    Seconds,
    SomeOf,
    check_settings,
    find_clashes,
    find_unread,
    plain_value,
    refuse,
    setting,
)

DTYPES = ["auto", "bfloat16", "float16", "float32"]
"""The choices of `dtype` in TRL's `ModelConfig`."""
BASELINES = ("base", "naive_rag", "closed_book")
KEY = "OPENAI_API_KEY"
"""Environment variable with the key of an endpoint, unless `api_key_env` names another."""
MAPPINGS = ("env_kwargs", "reward_options", "chat_template_kwargs", "endpoint_options", "row")
"""Settings that the command line gives as text."""
ENV_HELP = (
    "Environment: 'search_qa', 'bandit', 'frozen_lake', 'sokoban', 'countdown', or the import path of a class or "
    "function, my_module.MyEnv or envs/my_env.py:MyEnv."
)
ENV_KWARGS_HELP = (
    "Arguments of the environment, on the command line as '{top_k: 3}'; those of the recipe that are not named there "
    "stay."
)
ENV_OR_TOOLS = Clash(
    "env tools", lambda c: c.env and c.tools, "an environment brings its own tools. Remove one of them."
)


@dataclass
class CommandArguments:
    """Holds each setting to its rule, and all of them to the tables of their classes."""

    CLASHES: ClassVar[tuple[Clash, ...]] = ()
    NEEDS: ClassVar[tuple[Need, ...]] = ()

    def __post_init__(self) -> None:
        for name in MAPPINGS:
            if getattr(self, name, None) is not None:
                setattr(self, name, read_mapping(name, getattr(self, name)))
        check_settings(self)
        for kind in type(self).__mro__:
            refuse(find_clashes(self, vars(kind).get("CLASHES", ())))
        refuse(filter(None, [find_unread(self, self.NEEDS)]))


@dataclass
class TaskArguments(CommandArguments):
    """Environment and data."""

    env: str | None = setting(None, ENV_HELP)
    env_kwargs: dict[str, Any] | str | None = setting(None, ENV_KWARGS_HELP)
    dataset_config: str | None = setting(None, "Configuration of a data set on the Hub.")
    dataset_train_split: str = setting("train", "Split to train on, for Hub data sets.")
    dataset_test_split: str = setting("test", "Split to evaluate on, for Hub data sets.")


@dataclass
class TrainArguments(TaskArguments):
    """Settings of `train` beside those of the trainer and of the model."""

    CLASHES = (
        ENV_OR_TOOLS,
        Clash(
            "env",
            lambda c: not (c.env or c.tools or c.reward_funcs or c.turn_reward_funcs),
            f"the agent has nothing to act in. Set env. {ENV_HELP}",
        ),
    )

    dataset_name: str | None = setting(
        None,
        "Data set to train on: a .jsonl, .json, .csv or .parquet file, a directory, or a Hub id. None: the "
        "environment makes its own prompts.",
        aliases=["--dataset"],
    )
    eval_dataset_name: str | None = setting(None, "Data set to evaluate on during training.")
    num_eval_examples: Count | None = setting(None, "Number of rows of the evaluation data set to use. None: all.")
    trainer: str = setting(
        "grpo",
        "Algorithm: 'grpo' or 'ppo', or the path of a subclass of their trainers, my_module.MyTrainer.",
        aliases=["--algo"],
    )
    generator: str | None = setting(None, "Import path of your own generator, an object or a class without arguments.")
    tools: list[str] | None = setting(None, "Instead of env: import paths of functions. Requires reward_funcs.")
    reward_funcs: list[str] | None = setting(
        None, "Import paths of reward functions, beside the environment's own reward."
    )
    turn_reward_funcs: list[str] | None = setting(None, "Import paths of functions that reward each turn.")
    callbacks: list[str] | None = setting(
        None, "Import paths of callbacks that take part in the run (docs/extending.md)."
    )
    reward_options: dict[str, Any] | str | None = setting(
        None,
        "Options of reward functions by name, on the command line as '{overlong_penalty: {max_tokens: 900}}'; the "
        "recipe's for others stay.",
    )
    num_processes_expected: Count | None = setting(
        None, "Number of processes that this recipe was written for; any other is refused. None: any."
    )
    verbose: bool = setting(False, "Print every logged metric.")
    overwrite: bool = setting(
        False,
        "Start a new run in an output_dir that holds one: the old folder is moved to output_dir.1 (.2, ...). Off: "
        "refused.",
    )


@dataclass
class TemplateArguments(CommandArguments):
    """How a model is read and shown its conversation."""

    trust_remote_code: bool = setting(False, "Allow code that comes with the model to run.")
    chat_template: str | None = setting(None, "Chat template in place of the tokenizer's: source, file or TRL's name.")
    response_template: dict[str, Any] | str | None = setting(
        None, "Grammar that reads tool calls: a family's name, or a JSON file."
    )
    chat_template_kwargs: dict[str, Any] | str | None = setting(None, "Arguments of the chat template.")

    def chat_options(self) -> dict[str, Any]:
        """The arguments that `open_agent` and the doctor take."""
        names = ("trust_remote_code", "chat_template", "response_template", "chat_template_kwargs")
        return {name: getattr(self, name) or None if "kwargs" in name else getattr(self, name) for name in names}


@dataclass
class SamplingArguments(RolloutSettings, TemplateArguments):
    """How a model samples, for `eval`, `chat` and `serve`."""

    eval_temperature: NotNegative = setting(0.0, "Temperature; 0 is greedy.", aliases=["--temperature"])
    seed: int = setting(42, "Seed of sampling, environments and bootstrap intervals.")
    use_vllm: bool = setting(False, "Generate with vLLM, in this process.")
    dtype: str | None = setting(None, "None: that of the checkpoint on a GPU, float32 on a CPU.", choices=DTYPES)
    max_completion_length: int | None = setting(  # the default is TRL's
        512, RolloutSettings.__dataclass_fields__["max_completion_length"].metadata["help"]
    )
    secrets: SecretMapping = setting(None, SECRETS_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(find_limit_problems(self))


@dataclass
class EvalArguments(SamplingArguments, TaskArguments):
    """Settings of `eval`; the limits of a trajectory are those of training."""

    CLASHES = (
        Clash("env", lambda c: not c.env, f"the agent has nothing to act in. Set env. {ENV_HELP}"),
        Clash(
            "model_name_or_path",
            lambda c: not (c.model_name_or_path or c.replay),
            "there is nothing to evaluate. Pass --model with the directory or the Hub id of a model.",
        ),
        Clash(
            "eval_dataset_name",
            lambda c: not (c.eval_dataset_name or c.dataset_name),
            "there is nothing to evaluate on. Pass --dataset with a data file, a directory or a Hub id.",
        ),
        Clash(
            "api_key_env",
            lambda c: c.api_key_env and not os.environ.get(c.api_key_env),
            "there is no such environment variable. Set it to the key (export {c.api_key_env}=...), or name another.",
        ),
    )
    NEEDS = (
        Need("api_key_env endpoint_options", {"endpoint": None}),
        Need("base_model", {"baselines": BASELINES}),
    )

    model_name_or_path: list[str] | None = setting(
        None, "Models or PEFT adapters, one or several: directories or Hub ids.", aliases=["--model", "--models"]
    )
    eval_dataset_name: list[str] | None = setting(
        None,
        "Data sets, one or several: .jsonl, .json, .csv or .parquet files, directories, or Hub ids.",
        aliases=["--dataset", "--datasets"],
    )
    baselines: Annotated[list[str], SomeOf(*BASELINES)] | None = setting(
        None,
        "What to evaluate beside the model, on the same rows: 'base': the base model in the same environment; "
        "'naive_rag': one search with the question, one answer; 'closed_book': no tools, one answer.",
    )
    base_model: str | None = setting(
        None,
        "The model of the baselines. None: the recipe's model, where --model names others; without any, a single "
        "model itself answers for naive_rag and closed_book.",
    )
    endpoint: str | None = setting(
        None,
        "Evaluate a hosted model: the address of an OpenAI-compatible API, such as https://api.openai.com/v1 or "
        "http://127.0.0.1:8000/v1; --model is then the model's name there.",
    )
    api_key_env: str | None = setting(
        None,
        f"Environment variable that holds the key of the endpoint. None: {KEY}, and no key if that is not set. The "
        "key itself is written nowhere.",
    )
    endpoint_options: dict[str, Any] | str | None = setting(
        None,
        "Further settings of each request to the endpoint, such as '{reasoning_effort: low}'; null leaves out one "
        "that is sent otherwise, as in '{temperature: null}'.",
    )
    endpoint_concurrency: Count = setting(16, "Trajectories of a hosted model at once, in place of max_concurrency.")
    endpoint_timeout: Seconds = setting(
        600.0,
        "Seconds that one request to the endpoint may take, and that it waits in all while the endpoint is busy.",
    )
    top_p: float = setting(1.0, "Draw from the likeliest tokens, up to this probability. Greedy: no effect.")
    top_k: int = setting(0, "Draw from this many of the likeliest tokens; 0: from all. Greedy: no effect.")
    min_p: float | None = setting(None, "Least probability of a token, relative to the likeliest. Greedy: no effect.")
    repetition_penalty: float = setting(1.0, "Above 1: tokens that stood before are less likely, also greedily.")
    by: str | None = setting(
        None, "Column of the rows, such as 'level' or 'metadata.type': figures of each value, too."
    )
    resume: bool = setting(True, "Go on with an evaluation that was killed, from its journal; --no_resume: anew.")
    dataset_name: str | None = setting(None, "Training data of the recipe, used if eval_dataset_name is not set.")
    num_examples: Count | None = setting(None, "Number of rows to use. None: all.")
    num_generations_eval: Count = setting(1, "Attempts per example.", aliases=["--num_generations"])
    retry_failed: CountOrZero = setting(0, "How often a trajectory is sampled again if a server or tool failed.")
    output_dir: str | None = setting(
        None,
        "Directory for the table (evaluation.json, .md), trajectories and journal; of a run's directory, its folder "
        "`evaluation`. Not set: only print the table.",
    )
    journal: dict[str, Any] | str | None = setting(
        True,
        "Keep every turn in output_dir/journal (needs output_dir), so that an evaluation that was killed goes on: "
        "true, false, or a mapping; {replay: scores} takes the trajectories from the journal of another evaluation.",
    )
    generation_batch_rows: Count = setting(64, "Maximum number of requests per forward pass of transformers.")

    @property
    def replay(self) -> str | None:
        """Whose journal the trajectories are taken from; None where they are sampled."""
        found: str | None = plain_value(self, "journal.replay")
        return found

    def __post_init__(self) -> None:
        self.model_name_or_path = [name for name in self.model_name_or_path or () if name] or None
        kind = mappings_of("journal").get("journal")
        if kind is None and self.journal not in (True, False, None):  # it is on by default where it is installed
            feature("journal", f"journal={self.journal!r}")
        self.journal = None if kind is None else kind.read("journal", self.journal)
        super().__post_init__()
        if self.endpoint is not None:
            rules().note(self.endpoint_options)
            self.endpoint = api_url(self.endpoint)


HELP = {
    "eval": HelpPage(
        "Run a model on data sets and score it, beside baselines; or compare two evaluations (eval compare).",
        (EvalArguments,),
    )
}
"""Command -> its `--help`, of those that read recipes and name their settings without anything heavy."""


def read_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Read a mapping from a value that is one or is the YAML or JSON text of one."""
    if isinstance(value, str):
        value = read_text(value)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}={value!r}: must be a mapping. Set it to names with values, such as '{{top_k: 3}}'.")
    return value


NUMBER = "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]\d+$"), [*"-+.0123456789"]
"""1e-5 is a number in YAML 1.2, and a text to PyYAML."""


class YamlLoader(yaml.SafeLoader):
    """YAML with all numbers, in whatever mapping they stand."""


YamlLoader.add_implicit_resolver(*NUMBER)


def read_text(text: str) -> Any:
    """The value of a text on the command line, read as JSON or YAML."""
    for read in (json.loads, functools.partial(yaml.load, Loader=YamlLoader)):
        with contextlib.suppress(ValueError, yaml.YAMLError):
            return read(text)
    return text
