"""The card of a model on the Hub: `README.md` with its metadata, from what a run left in its directory.

A card that is there already, TRL's or the user's, is kept: its metadata is completed, and the sections of
`card.md.jinja` take the place of those of the same heading. What the Hub would refuse, such as a path in the place of
an id, is left out of the metadata. Texts of others are escaped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id

from agent_r1_trl.advantages.estimators import ESTIMATORS
from agent_r1_trl.recording.lines import EVALUATION
from agent_r1_trl.rollout.limits import RolloutSettings
from agent_r1_trl.safe_text import markdown, markdown_code, shown, shown_all
from agent_r1_trl.trainers.config import AGENT_R1

if TYPE_CHECKING:
    import jinja2

    from agent_r1_trl.advantages.estimators import Estimator

CARD = "README.md"
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
    "chat_template_kwargs", "response_template", "context",
    "max_tokens_per_turn", "max_observation_tokens", "max_invalid_calls",
)  # fmt: skip
"""Settings that decide what the model reads and writes in a turn, in training and in a chat."""
LICENSE = ("license", "license_name", "license_link")
"""Keys of a card's metadata that name its licence."""
NOT_METRICS = ("num_examples", "num_generations", "duration_s")
"""Numbers of an evaluation that are no results."""

_DEFAULTS = {item.name: item.default for item in dataclasses.fields(RolloutSettings)}
_HEADER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_SECTION = re.compile(r"^## (.+?)[ \t]*\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]+)\]\(https://huggingface\.co/datasets/\1\)")
"""TRL's link to a data set, which may be a path."""
_CHAT = re.compile(r"^(agent-r1-trl chat )('[^'\n]*'|\S+)", re.MULTILINE)
"""The line that starts an agent; that of a run without a repository names its directory."""
_MODEL = re.compile(r'model="(None|\./[^"\n]*)"')
"""The model in TRL's lines of a card that was made before there was a repository."""
_HEADLINE = re.compile(r"(eval_(\w+_)?)?(reward(/process|/outcome)?|rollout/(turns|tool_calls)|env/.+)")
"""Logged names that are shown in the card; of several evaluation sets, each has its name: eval_hard_reward."""


@dataclass(kw_only=True)
class Scores:
    """One method on one data set."""

    method: str
    data: str
    """Hub id or path of the data set; its short name where that is all that is known."""
    num_examples: int | None
    metrics: dict[str, tuple[float, list[float] | None]]
    """Metric -> value and 95% interval."""
    settings: Mapping[str, Any]


@dataclass(kw_only=True)
class CardFacts:
    """A run's own files about itself."""

    model_id: str
    """Under which the card tells to load the model."""
    is_adapter: bool = False
    base_model: str = ""
    license: dict[str, str] = field(default_factory=dict)
    """The keys of the metadata that name the licence of the base model; empty where it is unknown."""
    own_license: str = ""
    """The licence that the user names."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The settings of the run; empty if it left none."""
    scores: list[Scores] = field(default_factory=list)
    """The content of `evaluation.json`, in the folder `evaluation` of the run or beside the model."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The logs."""
    env: str = ""
    """Name of the environment."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas; None: unknown."""
    estimator: Estimator | None = None

    @property
    def data(self) -> dict[str, str]:
        """Use of a data set -> its Hub id or path."""
        names = {"training": "dataset_name", "evaluation": "eval_dataset_name"}
        return {use: str(self.recipe[name]) for use, name in names.items() if self.recipe.get(name)}


def read_facts(folder: Path, model_id: str) -> CardFacts:
    """The facts of the output directory of a run; `model_id` is under which the model will be found.

    Raises:
        ValueError: a file that it holds cannot be read; names it.
    """
    recipe = _read_mapping(folder / "recipe.yaml")
    adapter = _read_mapping(folder / "adapter_config.json")
    base = str(recipe.get("model_name_or_path") or adapter.get("base_model_name_or_path") or "")
    facts = CardFacts(
        model_id=model_id,
        is_adapter=bool(adapter),
        base_model=base,
        recipe=recipe,
        history=_read_mapping(folder / "trainer_state.json").get("log_history") or [],
        license=licence_of(base),
        env=str(recipe.get("env") or ""),
        estimator=ESTIMATORS.get(recipe.get("advantage_estimator", "")),
    )
    places = (folder / EVALUATION / "evaluation.json", folder / "evaluation.json")
    path = next(filter(Path.is_file, places), places[0])
    try:
        facts.scores = read_scores(_read_mapping(path), facts.data)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path}: holds no evaluation ({error}). Evaluate the model again, or remove it.") from error
    return facts


def licence_of(base_model: str) -> dict[str, str]:
    """The licence that the card of the base model names, read from its folder or from the Hub's cache here.

    It is empty where there is no such card: nothing is asked of the Hub.
    """
    card: object = Path(base_model) / CARD
    if not Path(base_model).is_dir():
        card = try_to_load_from_cache(base_model, CARD) if is_hub_id(base_model) else None
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return {}
    try:
        metadata = split_card(Path(card).read_text(encoding="utf-8", errors="replace"))[0]
    except ValueError:  # somebody else's card
        return {}
    return {name: str(metadata[name]) for name in LICENSE if metadata.get(name)} if metadata.get("license") else {}


def local_name(name: str) -> str:
    """What a reader elsewhere is told of a path of this machine: its last two parts.

    >>> local_name("/home/ada/data/test.jsonl"), local_name("/home/ada/task.py:MyEnv"), local_name("hotpotqa/qa")
    ('data/test.jsonl', 'ada/task.py:MyEnv', 'hotpotqa/qa')
    """
    return "/".join(Path(name).parts[-2:]) if Path(name).is_absolute() else name


def _without_local_paths(value: object) -> Any:
    """The value with each absolute path in it as `local_name` has it."""
    if isinstance(value, dict):
        return {name: _without_local_paths(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_local_paths(item) for item in value]
    return local_name(value) if isinstance(value, str) else value


def _read_mapping(path: Path) -> dict[str, Any]:
    """The content of a file of JSON or YAML; empty if there is none."""
    return _mapping(str(path), path.read_text(encoding="utf-8")) if path.is_file() else {}


def _mapping(place: str, text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text) if not place.endswith(".json") else json.loads(text)
        if isinstance(value, dict):
            return value
        problem = f"it holds {type(value).__name__}, not settings by name"
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
    raise ValueError(f"{place}: cannot be read ({problem}). Correct or remove it.")


def read_scores(evaluation: Mapping[str, Any], data: Mapping[str, str]) -> list[Scores]:
    """The rows of `evaluation.json`, one or those of a table; what has no finite value is left out.

    `data` is that of `CardFacts`, for an evaluation that does not name its own.
    """
    found = []
    for row in evaluation.get("rows", [evaluation]):
        settings, metrics = row.get("settings", {}), {}
        for name, value in row.items():
            if name not in NOT_METRICS and _is_finite(value):
                bounds = row.get("intervals", {}).get(name) or [None]
                metrics[name] = (float(value), bounds if all(map(_is_finite, bounds)) else None)
        named = settings.get("dataset_name") or row.get("dataset") or data.get("evaluation") or data.get("training")
        if metrics:
            method, num = row.get("method", "model"), row.get("num_examples")
            found.append(Scores(method=method, data=named or "", num_examples=num, metrics=metrics, settings=settings))
    return found


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---------------------------------------------------------------- the card


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
    metadata, body = complete_metadata(metadata, facts), body.strip()
    rendered = render(facts, in_full or not body)
    kept = {"Citations"} if body else set()
    if before and not (facts.env or facts.recipe.get("tools")):
        kept.add("Quick start")
    body = body or rendered.partition("\n## ")[0]
    body = _MODEL.sub(f'model="{facts.model_id}"', body)
    chat = shlex.quote(shown(facts.model_id))
    body = _CHAT.sub(lambda line: line[0] if is_hub_id(line[2].strip("'")) else line[1] + chat, body)
    body = _LINK.sub(lambda link: link[0] if is_hub_id(link[1]) else markdown_code(link[1]), body)
    for heading, text in _SECTION.findall(rendered):
        if text.strip() and heading not in kept:
            body = with_section(body, heading, text.strip(), is_first=heading == "Quick start")
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=10_000)
    return f"---\n{header}---\n\n{body.strip()}\n"


def render(facts: CardFacts, in_full: bool) -> str:
    """The template, filled; sections about which nothing is known are empty."""
    estimator, command = facts.estimator, quick_start(facts)
    results: dict[str, list[Scores]] = {}
    for scores in facts.scores:
        results.setdefault(data_name(scores.data), []).append(scores)
    return _template().render(
        vars(facts) | {"base_model": local_name(facts.base_model), "env": local_name(facts.env)},
        in_full=in_full,
        data={use: local_name(name) for use, name in facts.data.items()},
        options=agent_options(facts.recipe),
        command=command,
        fence="`" * (3 if "```" not in command else 9),
        settings=dict.fromkeys((*SETTINGS, *(estimator.options if estimator else ()))),
        metrics=metrics(facts.history),
        papers=dict.fromkeys((*PAPERS, *(estimator.papers if estimator else ()))),
        citation=AGENT_R1["citation"],
        results=results,
    )


@functools.cache  # each checkpoint has a card, and compiling takes a tenth of a second
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {
        "md": lambda text: markdown("" if text is None else str(text)),
        "code": lambda text: markdown_code(str(text)),
        # One line, so that nothing in it closes its block of code.
        "json": lambda item: shown(json.dumps(item or {}, ensure_ascii=False)),
    }
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))


def metrics(history: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The logged values of the headline metrics, train and eval, and of the environment's own."""
    values: dict[str, list[float]] = {}
    for name, value in (item for entry in history for item in entry.items()):
        if isinstance(value, int | float) and _HEADLINE.fullmatch(name):
            values.setdefault(name, []).append(float(value))
    return dict(sorted(values.items()))


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Metadata and body of a card.

    Raises:
        ValueError: the metadata is no YAML.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")  # as editors on Windows write
    match = _HEADER.match(text)
    if match is None:
        return {}, text
    return _mapping(f"The metadata at the top of {CARD}", match[1] or "{}"), text[match.end() :]


def with_section(body: str, heading: str, text: str, *, is_first: bool = False) -> str:
    r"""The body with a section of second level in the place of the one with that heading, else in front of citations.

    A new section that `is_first` stands in front of all others.

    >>> with_section("# A\n\n## Results\n\nold\n\n## Citations\n", "Results", "new")
    '# A\n\n## Results\n\nnew\n\n## Citations\n'
    """
    section = f"## {heading}\n\n{text}\n\n"
    for place in _SECTION.finditer(body):
        if place[1] == heading:
            return f"{body[: place.start()]}{section}{body[place.end() :]}"
    after = re.search(r"^## " if is_first else r"^## Citations?[ \t]*$", body, re.MULTILINE)
    start = after.start() if after else len(body)
    return f"{body[:start].rstrip()}\n\n{section}{body[start:]}"


# ---------------------------------------------------------------- metadata


def complete_metadata(metadata: Mapping[str, Any], facts: CardFacts) -> dict[str, Any]:
    """The metadata with what is known of the run, and without ids that are none."""
    done = {"pipeline_tag": "text-generation", **facts.license, **metadata}
    done.pop("licence", None)  # of TRL's template, with the value "license"
    if facts.own_license:
        done = {name: value for name, value in done.items() if name not in LICENSE}
        done["license"] = facts.own_license
    if facts.is_adapter:
        done["library_name"] = "peft"
    elif not done.get("library_name"):
        done["library_name"] = "transformers"
    tags = [*_texts(done.get("tags")), "agent-r1-trl", "reinforcement-learning"]
    done["tags"] = list(dict.fromkeys(tags))
    for name, found in (("base_model", facts.base_model), ("datasets", list(facts.data.values()))):
        given = done.pop(name, None) or found
        ids = list(dict.fromkeys(text for text in _texts(given) if is_hub_id(text)))
        done[name] = ids[0] if ids and isinstance(given, str) else ids
    return dict(shown_all({name: value for name, value in done.items() if value not in (None, "", [])}))


def _texts(value: object) -> list[str]:
    """The entries of a field that holds a list, or one alone."""
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


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


# ---------------------------------------------------------------- the line that starts the agent


def quick_start(facts: CardFacts) -> str:
    """The command that starts a chat with the agent, its tools and the settings that decide what it reads."""
    options = agent_options(facts.recipe)
    for name in READ_SETTINGS:
        value = facts.recipe.get(name)
        if value not in (None, {}, "", _DEFAULTS.get(name)) and (text := _text_of(value)) is not None:
            options += [f"--{name}", text]
    return shlex.join(shown(part) for part in ("agent-r1-trl", "chat", facts.model_id, *options))


def agent_options(recipe: Mapping[str, Any]) -> list[str]:
    """The options that name a recipe's environment or tools; none where a reader cannot make the same."""
    if not recipe.get("env"):
        tools = [local_name(name) for name in _texts(recipe.get("tools") or None)]
        return ["--tools", *tools] if tools else []
    given = {name: item for name, item in (recipe.get("env_kwargs") or {}).items() if item is not None}
    text = _text_of(_without_local_paths(given))
    if text is None:
        return []
    options = ["--env", local_name(str(recipe["env"]))]
    if text != "{}":
        options += ["--env_kwargs", text]
    return options


def _text_of(value: object) -> str | None:
    """A value as it stands on a command line, with secrets masked; None if JSON cannot hold it."""
    try:
        return value if isinstance(value, str) else json.dumps(shown_all(value), ensure_ascii=False)
    except (TypeError, ValueError):
        return None
