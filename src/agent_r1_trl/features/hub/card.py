"""The card of a model on the Hub: `README.md` with its metadata, from what a run left in its directory.

A card that is there already, TRL's or the user's, is kept: its metadata is completed, and the sections that are made
here take the place of those of the same heading. What the Hub would refuse, such as a path in the place of an id, is
left out of the metadata. Texts of others are escaped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index
from huggingface_hub.utils import HFValidationError, validate_repo_id

from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, SingleTurnEnv
from agent_r1_trl.rollout.limits import RolloutSettings
from agent_r1_trl.safe_text import markdown, markdown_code, shown, shown_all
from agent_r1_trl.trainers.paper import AGENT_R1

if TYPE_CHECKING:
    from agent_r1_trl.advantages.estimators import Estimator

CARD = "README.md"
TAG = "agent-r1-trl"
PAPERS = (
    (AGENT_R1["title"], AGENT_R1["id"]),
    ("RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning", "2504.20073"),
)
SETTINGS = (
    "max_turns", "max_tokens_per_turn", "max_completion_length", "max_observation_tokens", "max_invalid_calls",
    "truncated_trajectories", "advantage_estimator", "loss_mask", "advantage_mask", "num_generations",
    "rollout_shape", "temperature", "learning_rate", "beta", "critic",
)  # fmt: skip
"""Settings that every card lists; those that the estimator reads come with its row."""
READ_SETTINGS = (
    "thinking", "chat_template_kwargs", "response_template", "context",
    "max_tokens_per_turn", "max_observation_tokens", "max_invalid_calls",
)  # fmt: skip
"""Settings that decide what the model reads and writes in a turn, in training and in a chat."""
METHODS = {
    "model": "this model with its tools",
    "base": "the model before the training, with the same tools",
    "naive_rag": "one search with the question, one answer",
    "closed_book": "no tools, one answer",
}
NOT_METRICS = ("num_examples", "num_generations", "duration_s")
"""Numbers of an evaluation that are no results."""

_DEFAULTS = {"thinking": "keep", **{item.name: item.default for item in dataclasses.fields(RolloutSettings)}}
_HEADER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]+)\]\(https://huggingface\.co/datasets/\1\)")
"""TRL's link to a data set, which may be a path."""
_HEADLINE = re.compile(r"(eval_(\w+_)?)?(reward(/process|/outcome)?|rollout/(turns|tool_calls)|env/.+)")
"""Logged names that are shown in the card; of several evaluation sets, each has its name: eval_hard_reward."""


@dataclass(kw_only=True)
class CardFacts:
    """What a run left about itself."""

    model_id: str
    """Under which the card tells to load the model."""
    is_adapter: bool = False
    base_model: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The settings of the run; empty if it left none."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """`evaluation.json`; empty if there is none."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """What was logged."""
    env: str = ""
    """Name of the environment."""
    env_factory: Callable[..., Any] | None = None
    tools: list[dict[str, Any]] | None = None
    """JSON schemas; None: unknown."""
    estimator: Estimator | None = None
    guard_steps: int = 0
    guard_events: list[dict[str, Any]] = field(default_factory=list)
    """What a guard did about a collapse."""

    @property
    def data(self) -> dict[str, str]:
        """What a data set was used for -> its Hub id or path."""
        names = {"training": "dataset_name", "evaluation": "eval_dataset_name"}
        return {use: str(self.recipe[name]) for use, name in names.items() if self.recipe.get(name)}


def read_facts(folder: Path, model_id: str) -> CardFacts:
    """The facts of an output directory.

    Args:
        folder: of a run.
        model_id: under which the model will be found.

    Raises:
        ValueError: a file that it holds cannot be read; names it.
    """
    from agent_r1_trl.advantages.lookup import find_estimator

    recipe, adapter = _read_mapping(folder / "recipe.yaml"), _read_mapping(folder / "adapter_config.json")
    logged = _read_mapping(folder / "trainer_state.json").get("log_history")
    trained = str(recipe.get("model_name_or_path") or "")
    base = str(adapter.get("base_model_name_or_path") or trained)
    if trained and base.endswith(f"/{trained}"):  # the same, with where it lies on this machine
        base = trained
    try:
        name = recipe.get("advantage_estimator")
        estimator = find_estimator(str(name), has_critic=recipe.get("trainer") == "ppo") if name else None
    except ValueError:  # one of the user's own
        estimator = None
    return CardFacts(
        model_id=model_id,
        is_adapter=bool(adapter),
        base_model=base,
        recipe=recipe,
        evaluation=_of_model(_read_mapping(folder / "evaluation.json"), folder),
        history=[entry for entry in logged if isinstance(entry, dict)] if isinstance(logged, list) else [],
        env=str(recipe.get("env") or ""),
        estimator=estimator,
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    """The content of a file of JSON or YAML; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read ({problem}). Write it again, or remove it.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}, not settings by name. Write it again, or remove it.")
    return value


def _of_model(evaluation: dict[str, Any], folder: Path) -> dict[str, Any]:
    """In a table of several models each has a name of its own: the one in this directory becomes "model"."""
    rows = evaluation.get("rows")
    if not isinstance(rows, list) or any(_mapping(row).get("method") == "model" for row in rows):
        return evaluation

    def is_here(row: Any) -> bool:
        model = _mapping(_mapping(row).get("settings")).get("model")
        is_baseline = _mapping(row).get("method") in METHODS
        return not is_baseline and isinstance(model, str) and Path(model).resolve() == folder.resolve()

    return {**evaluation, "rows": [{**row, "method": "model"} if is_here(row) else row for row in rows]}


def make_card(facts: CardFacts, before: str = "", *, in_full: bool = False) -> str:
    """The text of the card.

    Args:
        facts: of the run.
        before: the card so far; empty if there is none.
        in_full: add what a card of the user's own is not given: environment, tools, settings, metrics, method.

    Raises:
        ValueError: the metadata of that card is no YAML.
    """
    metadata, body = split_card(before)
    metadata, in_full = complete_metadata(metadata, facts), in_full or not body.strip()
    body = body if body.strip() else _new_body(facts)
    body = body.replace('model="None"', f'model="{facts.model_id}"')  # TRL's, before there is a repository
    body = _LINK.sub(lambda link: link[0] if is_hub_id(link[1]) else markdown_code(link[1]), body)
    if not before or facts.env_factory is not None or agent_options(facts.recipe, None):
        quick = quick_start(facts.model_id, facts.recipe, facts.env_factory)
        body = with_section(body, "Quick start", quick, is_first=True)
    made = _run_sections(facts) if in_full else {}
    for heading, text in (made | {"Data": _data(facts), "Results": results(facts)}).items():
        body = with_section(body, heading, text)
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=10_000)
    return f"---\n{header}---\n\n{body.strip()}\n"


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Metadata and body of a card.

    Raises:
        ValueError: the metadata is no YAML.
    """
    text = text.replace("\r\n", "\n")
    match = _HEADER.match(text)
    if match is None:
        return {}, text
    try:
        metadata = yaml.safe_load(match.group(1)) or {}
        if not isinstance(metadata, dict):
            raise ValueError("it is no mapping")
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{CARD}: the metadata at the top is no YAML ({problem}). Correct or remove it.") from error
    return metadata, text[match.end() :]


def with_section(body: str, heading: str, text: str, *, is_first: bool = False) -> str:
    r"""The body with a section of second level in the place of the one with that heading, else in front of citations.

    Args:
        body: of a card.
        heading: of the section.
        text: of the section, without its heading; empty: the body stays.
        is_first: a new section stands in front of all others.

    >>> with_section("# A\n\n## Results\n\nold\n\n## Citations\n", "Results", "new")
    '# A\n\n## Results\n\nnew\n\n## Citations\n'
    """
    if not text:
        return body
    section = f"## {heading}\n\n{text}\n\n"
    place = re.search(rf"^## {re.escape(heading)}[ \t]*$.*?(?=^## |\Z)", body, re.MULTILINE | re.DOTALL)
    if place is not None:
        return f"{body[: place.start()]}{section}{body[place.end() :]}"
    after = re.search(r"^## " if is_first else r"^## Citations?[ \t]*$", body, re.MULTILINE)
    start = after.start() if after else len(body)
    return f"{body[:start].rstrip()}\n\n{section}{body[start:]}"


def complete_metadata(metadata: Mapping[str, Any], facts: CardFacts) -> dict[str, Any]:
    """The metadata with what is known of the run, and without ids that are none."""
    done = dict(metadata)
    done["library_name"] = "peft" if facts.is_adapter else done.get("library_name") or "transformers"
    done.setdefault("pipeline_tag", "text-generation")
    tags = done.get("tags")
    tags = tags if isinstance(tags, list) else [] if tags is None else [tags]
    done["tags"] = list(dict.fromkeys([*map(str, tags), TAG, "reinforcement-learning"]))
    for name, found in (("base_model", [facts.base_model]), ("datasets", list(facts.data.values()))):
        given = done.pop(name, None) or found
        ids = [str(item) for item in (given if isinstance(given, list) else [given]) if is_hub_id(str(item))]
        if ids:
            is_one = isinstance(given, str) or name == "base_model"
            done[name] = ids[0] if is_one and len(ids) == 1 else list(dict.fromkeys(ids))
    if index := model_index(facts):
        done["model-index"] = index
    return dict(shown_all({name: value for name, value in done.items() if value not in (None, "", [])}))


# ---------------------------------------------------------------- sections


def _new_body(facts: CardFacts) -> str:
    base = f" from {markdown_code(facts.base_model)}" if facts.base_model else ""
    return (
        f"# {markdown(facts.model_id.rpartition('/')[2])}\n\n"
        f"A {'PEFT adapter' if facts.is_adapter else 'language model'} that was trained{base} to use tools over many "
        "turns, with reinforcement learning (agent-r1-trl, on top of [TRL](https://github.com/huggingface/trl)).\n\n"
        f"## Citations\n\n```bibtex\n{AGENT_R1['citation']}\n```"
    )


def _run_sections(facts: CardFacts) -> dict[str, str]:
    """Heading -> what is said of the training; empty where there is nothing to say."""
    estimator, parts, made = facts.estimator, [], {}
    if facts.env:
        template = "The chat template saved with the tokenizer is the one that the model was trained with."
        made["Environment"] = f"{markdown_code(facts.env)}\n\n{template}"
    for function in (schema["function"] for schema in facts.tools or ()):
        # The schema is one line, so that nothing in it closes the block.
        schema = shown(json.dumps(function.get("parameters", {}), ensure_ascii=False))
        about = markdown(str(function.get("description") or ""))
        parts.append(f"- {markdown_code(function['name'])}: {about}\n\n  ```json\n  {schema}\n  ```")
    made["Tools"] = "" if facts.tools is None else "\n\n".join(parts) or "None, or chosen for each row."
    names = dict.fromkeys((*SETTINGS, *(estimator.options if estimator else ())))
    known = [(name, markdown(str(facts.recipe[name]))) for name in names if facts.recipe.get(name) is not None]
    made["Training settings"] = _table(("setting", "value"), known)
    made["Metrics"] = metrics(facts.history)
    if facts.guard_events:
        columns = ("step", "state", "action", "outcome", "text")
        rows = [[markdown(str(event[name])) for name in columns] for event in facts.guard_events]
        table = _table(("step", "the run was", "action", "outcome", "what it did"), rows)
        steps = f"Steps made: {facts.guard_steps}, those included that a rollback has undone."
        made["What the guard did"] = f"{steps}\n\n{table}"
    said, papers = "", [*PAPERS]
    if estimator is not None:
        summary = "; ".join(part for part in (estimator.baseline, estimator.credit) if part)
        said = f"Advantages: `{estimator.name}`{summary and f' ({summary})'}\n\n"
        papers += estimator.papers
    made["Method"] = said + "\n".join(f"- [{title}](https://arxiv.org/abs/{number})" for title, number in papers)
    return made


def metrics(history: Iterable[Mapping[str, Any]]) -> str:
    """First and last logged value of the headline metrics, train and eval, and of the environment's own."""
    values: dict[str, list[float]] = {}
    for name, value in (item for entry in history for item in entry.items()):
        if isinstance(value, int | float) and _HEADLINE.fullmatch(name):
            values.setdefault(name, []).append(float(value))
    rows = [(markdown(name), f"{series[0]:.4g}", f"{series[-1]:.4g}") for name, series in sorted(values.items())]
    return _table(("metric", "first", "last"), rows)


def _data(facts: CardFacts) -> str:
    return "\n".join(f"- {use}: {markdown_code(name)}" for use, name in facts.data.items())


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; empty without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]]) if len(lines) > 1 else ""


# ---------------------------------------------------------------- results


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One method on one data set."""

    metrics: dict[str, tuple[float, list[float] | None]]
    """Metric -> value and 95% interval."""
    method: str
    data: str
    """Hub id or path of the data set; its short name where that is all that is known."""
    num_examples: int | None
    settings: Mapping[str, Any]


def scores_of(facts: CardFacts) -> Iterator[Scores]:
    """The rows of an evaluation: one, or the table of `agent-r1-trl eval`; what has no finite value is left out."""
    rows = facts.evaluation.get("rows", [facts.evaluation])
    for row in rows if isinstance(rows, list) else ():
        row = _mapping(row)
        intervals, settings = _mapping(row.get("intervals")), _mapping(row.get("settings"))
        found: dict[str, tuple[float, list[float] | None]] = {}
        for name, value in row.items():
            if name not in NOT_METRICS and _is_number(value):
                bounds: Any = intervals.get(name)
                is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2 and all(map(_is_number, bounds))
                found[str(name)] = (float(value), [float(bound) for bound in bounds] if is_pair else None)
        if found:
            own = facts.data.get("evaluation") or facts.data.get("training") or ""
            yield Scores(
                metrics=found,
                method=str(row.get("method") or "model"),
                data=str(settings.get("dataset_name") or row.get("dataset") or own),
                num_examples=row["num_examples"] if _is_number(row.get("num_examples")) else None,
                settings=settings,
            )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def results(facts: CardFacts) -> str:
    """The figures of an evaluation with their intervals, a table for each data set."""
    tables: dict[str, list[Scores]] = {}
    for scores in scores_of(facts):
        tables.setdefault(data_name(scores.data), []).append(scores)
    parts = []
    for data, listed in tables.items():
        parts += [f"### {markdown(data or 'without a name')}"] if len(tables) > 1 else []
        num, heat = listed[0].num_examples, listed[0].settings.get("temperature")
        of_data = f" of {markdown_code(data)}" if data else ""
        drawn = f", sampled at temperature {heat:g}" if _is_number(heat) and heat else ", greedy" if heat == 0 else ""
        shown_num = "?" if num is None else num
        parts.append(
            f"{shown_num} examples{of_data}{drawn}; 95% intervals (bootstrap; Wilson's where each is 0 or 1)."
        )
        names = dict.fromkeys(name for scores in listed for name in scores.metrics)
        cells = {name: [_cells(scores, name) for scores in listed] for name in names}
        if len(listed) == 1:
            parts.append(_table(("metric", "value", "95% interval"), [(markdown(n), *cells[n][0]) for n in names]))
        else:  # a column for each method
            both = {n: [f"{value} ({bounds})" if bounds else value for value, bounds in cells[n]] for n in names}
            head = ["metric", *(markdown(scores.method) for scores in listed)]
            parts.append(_table(head, [(markdown(n), *both[n]) for n in names]))
    named = dict.fromkeys(scores.method for listed in tables.values() for scores in listed)
    if set(named) - {"model"}:
        parts.append("\n".join(f"- {markdown(name)}: {METHODS[name]}" for name in named if name in METHODS))
    return "\n\n".join(part for part in parts if part)


def _cells(scores: Scores, name: str) -> tuple[str, str]:
    value, bounds = scores.metrics.get(name, (None, None))
    text = "" if value is None else f"{value:.4g}"
    return text, "" if bounds is None else f"{bounds[0]:.4g} to {bounds[1]:.4g}"


def model_index(facts: CardFacts) -> list[dict[str, Any]]:
    """The model's own results in the Hub's form, which takes what stands there for the model's: no baselines."""
    found = []
    for scores in scores_of(facts):
        parts = {f"dataset_{name}": scores.settings.get(f"dataset_{name}") or None for name in ("config", "split")}
        data = data_name(scores.data) or "unknown"
        for name, (value, bounds) in scores.metrics.items() if scores.method == "model" else ():
            arguments = {"num_examples": scores.num_examples, "interval_95": bounds}
            result = EvalResult(
                task_type="text-generation",
                task_name="Multi-turn tool use",
                dataset_type=data,
                dataset_name=data,
                **(parts if is_hub_id(scores.data) else {}),
                metric_type=name,
                metric_name=name.replace("_", " "),
                metric_value=value,
                metric_args={name: item for name, item in arguments.items() if item is not None} or None,
            )
            found.append(result)
    return eval_results_to_model_index(facts.model_id.rpartition("/")[2], found) if found else []


def is_hub_id(name: str) -> bool:
    """Whether a name can be the id of a model or data set; no path, and nothing that exists here under that name.

    >>> is_hub_id("Qwen/Qwen3-0.6B"), is_hub_id("data/train.jsonl"), is_hub_id("./model"), is_hub_id("None")
    (True, False, False, False)
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    endings = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".yaml")
    return name not in ("", "None") and not name.lower().endswith(endings) and not Path(name).exists()


def data_name(name: str) -> str:
    """An id of the Hub as it is; the last two parts of a path.

    >>> data_name("hotpotqa/hotpot_qa"), data_name("/home/ada/data/test.jsonl")
    ('hotpotqa/hotpot_qa', 'data/test.jsonl')
    """
    return name if is_hub_id(name) else "/".join(Path(name).parts[-2:])


# ---------------------------------------------------------------- the lines that start the agent


def quick_start(model: str, recipe: Mapping[str, Any], factory: Callable[..., Any] | None) -> str:
    """The commands that start a chat with the agent and its tools.

    Args:
        model: Hub id or directory.
        recipe: settings of the training; empty if they are not known.
        factory: of the environment; None if there is none, or if it cannot be made here.
    """
    options, note = agent_options(recipe, factory), "It was trained without tools."
    if options:
        note = (
            "The agent's tools come with its environment. What the lines below name, a corpus or a module of the "
            "author's, has to be there."
        )
    elif factory is not None and _made_by(factory) is not SingleTurnEnv:
        name = str(getattr(_made_by(factory), "__name__", "environment"))
        note = (
            f"Its tools come from the code of the training ({markdown_code(name)}), which is not in this repository: "
            "give their import paths, `--env my_module.MyEnv` or `--tools my_module:search`."
        )
    elif not recipe:
        note = (
            "Its tools are not recorded here: `--tools my_module:search` gives it some, or `--env my_module.MyEnv` an "
            "environment."
        )
    for name in READ_SETTINGS:
        value = recipe.get(name)
        if value not in (None, {}, "") and value != _DEFAULTS.get(name):
            text = value if isinstance(value, str) else _json_of(value)
            options += [f"--{name}", text] if text is not None else []
    command = shlex.join(shown(part) for part in ("agent-r1-trl", "chat", model, *options))
    fence = "```"
    while fence in command:
        fence += "`"
    return f"{note}\n\n{fence}bash\npip install agent-r1-trl\n{command}\n{fence}"


def agent_options(recipe: Mapping[str, Any], factory: Callable[..., Any] | None) -> list[str]:
    """The options that name the environment or the tools; none where a reader cannot import them.

    Args:
        recipe: names it under `env` and `env_kwargs`, or under `tools`, if it was started from one.
        factory: of the environment, which is looked at if there is no such name.
    """
    tools, path = recipe.get("tools"), str(recipe.get("env") or "")
    arguments: tuple[Any, ...] = ()
    keywords = {name: item for name, item in _mapping(recipe.get("env_kwargs")).items() if item is not None}
    if not path and tools:
        return ["--tools", *map(str, tools if isinstance(tools, list) else [tools])]
    if not path:
        if factory is None or _made_by(factory) is SingleTurnEnv:
            return []
        keywords = {}
        if isinstance(factory, functools.partial):
            arguments, keywords = factory.args, factory.keywords
        if _made_by(factory) is FunctionToolsEnv and len(arguments) == 1:
            paths = [_path_of(getattr(item, "fn", item), ":") for item in arguments[0]]
            return ["--tools", *paths] if all(paths) and not keywords else []  # type: ignore[list-item]
        path = _path_of(_made_by(factory), ".") or ""
    text = _json_of(keywords)
    if not path or arguments or text is None:
        return []
    return ["--env", path, *(["--env_kwargs", text] if keywords else [])]


def _made_by(factory: Callable[..., Any]) -> Any:
    return factory.func if isinstance(factory, functools.partial) else factory


def _path_of(target: Any, mark: str) -> str | None:
    """The import path of a class or a function; None where a reader cannot import it."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return None
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}{mark}{name}" if getattr(found, "fn", found) is target else None


def _json_of(value: Any) -> str | None:
    """A value as JSON, with secrets masked; None if it is none."""
    try:
        text = json.dumps(shown_all(value), ensure_ascii=False)
        return text if json.loads(text) == shown_all(value) else None
    except (TypeError, ValueError):
        return None
