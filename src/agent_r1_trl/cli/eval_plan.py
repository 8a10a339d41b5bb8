"""What an evaluation plays: a row for each method on each data set, ordered by model so that each is loaded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.eval_settings import BASELINES
from agent_r1_trl.cli.shipped_recipes import without_package_paths

if TYPE_CHECKING:
    from agent_r1_trl.cli.arguments import EvalArguments
    from agent_r1_trl.rollout import RolloutLimits

MODEL = "model"
"""Method: the evaluated model, with its tools. Of several models, each is a method with a name of its own."""
ONE_ANSWER = ("naive_rag", "closed_book")
"""Baselines without turns."""


@dataclass(kw_only=True)
class PlannedRow:
    """One row of the table, before it is played."""

    method: str
    dataset: str
    """Its short name."""
    source: dict[str, str | None]
    """What the short name stands for, for the settings of the result: a path or an id, and which part of it."""
    model: str | None
    """None where nothing is sampled (`replay`)."""
    rows: Any
    env_factory: Callable[[], Any]
    is_one_answer: bool
    is_hosted: bool = False
    """The model is behind the endpoint."""
    folder: str
    """Below output_dir; "" if this is the only row."""

    @property
    def player(self) -> tuple[str | None, bool]:
        """What is loaded or opened for this row."""
        return self.model, self.is_hosted

    def limits(self, limits: RolloutLimits) -> RolloutLimits:
        """Those of the run, with one turn for a baseline of one answer."""
        from agent_r1_trl.evaluation.baselines import one_answer_limits

        return one_answer_limits(limits) if self.is_one_answer else limits


def make_plan(arguments: EvalArguments, env_factory: Callable[[], Any]) -> list[PlannedRow]:
    """The rows of the table, in its order: by data set, baselines first.

    Raises:
        UsageError: a data set cannot be loaded, or a baseline is not possible.
    """
    from agent_r1_trl.evaluation.table import dataset_labels

    names = arguments.eval_dataset_name or [str(arguments.dataset_name)]
    if len({Path(name).resolve() if Path(name).exists() else name for name in names}) < len(names):
        raise UsageError(f"eval_dataset_name={names}: a data set stands there twice. Remove one of them.")
    models = _models(arguments)
    factories = {method: _factory(arguments, method, env_factory) for method in models}
    hosted = [method for method in models if arguments.endpoint and method != "base"]
    loaded = [_load(arguments, name) for name in names]
    is_alone = len(names) * len(models) == 1
    return [
        PlannedRow(
            method=method,
            dataset=label,
            source=_source(arguments, name),
            model=None if arguments.replay else model,
            rows=rows,
            env_factory=factories[method],
            is_one_answer=method in ONE_ANSWER,
            is_hosted=method in hosted,
            folder="" if is_alone else f"{label}/{method}",
        )
        for name, label, rows in zip(names, dataset_labels(names), loaded, strict=True)
        for method, model in models.items()
    ]


def _models(arguments: EvalArguments) -> dict[str, str | None]:
    """Method -> what plays it, baselines first.

    Raises:
        UsageError: a model stands there twice, or it is not known what plays a baseline.
    """
    from agent_r1_trl.evaluation.table import model_labels

    given = arguments.model_name_or_path or []
    if len({Path(name).resolve() if Path(name).exists() else name for name in given}) < len(given):
        raise UsageError(f"model_name_or_path={given}: a model stands there twice. Remove one of them.")
    names = dict.fromkeys(arguments.baselines or ())
    played: dict[str, str | None] = {method: _baseline_model(arguments, method) for method in names}
    if len(given) <= 1:
        return {**played, MODEL: given[0] if given else None}
    return {**played, **dict(zip(model_labels(given, taken=(*BASELINES, MODEL)), given, strict=True))}


def _baseline_model(arguments: EvalArguments, method: str) -> str | None:
    """What plays a baseline; None where nothing is sampled."""
    given = arguments.model_name_or_path or []
    if arguments.replay:
        return None
    if arguments.endpoint and method != "base":
        if len(given) > 1:
            raise UsageError(
                f"baselines={method!r}: which of the hosted models {', '.join(given)} is to play it? Pass one of "
                "them, or remove the baseline."
            )
        return given[0]
    base = arguments.base_model or (None if arguments.endpoint else _base_of_adapters(given))
    if base is None and len(given) == 1 and method != "base":
        return given[0]
    if base is None or (base in given and method == "base" and not arguments.endpoint):
        raise UsageError(
            f"baselines={method!r}: no other model than {', '.join(given)} is named. Pass --base_model, the model "
            "before training, or --model together with a recipe that names that model."
        )
    return base


def _source(arguments: EvalArguments, name: str) -> dict[str, str | None]:
    from agent_r1_trl.cli.resolve import FILE_FORMATS

    named: dict[str, str | None] = {"dataset_name": without_package_paths(name)}
    if Path(name).suffix in FILE_FORMATS:
        return named
    is_own = arguments.eval_dataset_name is not None
    split = arguments.dataset_test_split if is_own else arguments.dataset_train_split
    return named | {"dataset_config": arguments.dataset_config, "dataset_split": split}


def _factory(arguments: EvalArguments, method: str, env_factory: Callable[[], Any]) -> Callable[[], Any]:
    from agent_r1_trl.evaluation.baselines import NAIVE_RAG, check_baseline, without_tools

    if method not in BASELINES or arguments.replay:
        return env_factory
    try:
        check_baseline(method, env_factory, f"env={arguments.env!r}")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if method == "base":
        return env_factory
    return without_tools(
        env_factory,
        searches=method == NAIVE_RAG,
        system_prompt=arguments.baseline_prompt,
        max_passage_tokens=arguments.max_observation_tokens,
    )


def _base_of_adapters(models: Sequence[str]) -> str | None:
    """The model that all adapters were trained on; None if there is no adapter, or they differ."""
    bases = set()
    for model in models:
        adapter = Path(model) / "adapter_config.json"
        if adapter.is_file():
            try:
                bases.add(str(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{adapter}: names no base model ({type(error).__name__}: {error}). Save the adapter again, or "
                    "pass --base_model."
                ) from error
    return bases.pop() if len(bases) == 1 else None


def data_flag(arguments: EvalArguments) -> str:
    """The setting that names the data sets."""
    return "dataset_name" if arguments.eval_dataset_name is None else "eval_dataset_name"


def _load(arguments: EvalArguments, name: str) -> Any:
    from agent_r1_trl.cli.resolve import load_rows
    from agent_r1_trl.evaluation.groups import tags_of

    is_own = arguments.eval_dataset_name is not None
    flag = data_flag(arguments)
    rows = load_rows(
        flag,
        name,
        config=arguments.dataset_config,
        split=arguments.dataset_test_split if is_own else arguments.dataset_train_split,
        limit=arguments.num_examples,
    )
    if arguments.by:
        try:
            tags_of(rows, arguments.by)
        except ValueError as error:
            raise UsageError(f"{flag}={name!r}: {error}") from error
    return rows
