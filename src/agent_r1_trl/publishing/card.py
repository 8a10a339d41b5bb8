"""The card of a model on the Hub: `README.md` with its metadata, from what a run left in its directory.

A card that is there already, TRL's or the user's, is kept: its metadata is completed, and the sections that are made
here take the place of those of the same heading. What the Hub would refuse, such as a path in the place of an id, is
left out of the metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent_r1_trl.publishing import sections
from agent_r1_trl.publishing.names import is_hub_id
from agent_r1_trl.publishing.quick_start import agent_options, quick_start_section
from agent_r1_trl.publishing.results import model_index, of_model, results_section
from agent_r1_trl.safe_text import markdown, markdown_code, shown_all

CARD = "README.md"
RECIPE = "recipe.yaml"
EVALUATION = "evaluation.json"
STATE = "trainer_state.json"
TAG = "agent-r1-trl"

_HEADER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]+)\]\(https://huggingface\.co/datasets/\1\)")
"""TRL's to a data set, which may be a path."""


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
    env_factory: Callable[..., Any] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas."""
    curves: str = ""
    """Name of the image; empty if there is none."""

    @property
    def data(self) -> dict[str, str]:
        """What a data set was used for -> its Hub id or path."""
        names = {"training": "dataset_name", "evaluation": "eval_dataset_name"}
        return {use: str(self.recipe[name]) for use, name in names.items() if self.recipe.get(name)}

    @property
    def evaluated_on(self) -> str:
        """The data set of an evaluation that does not name its own; empty if none is known."""
        return self.data.get("evaluation") or self.data.get("training") or ""


def read_facts(folder: Path, model_id: str) -> CardFacts:
    """The facts of an output directory.

    Args:
        folder: of a run.
        model_id: under which the model will be found.

    Raises:
        ValueError: a file that it holds cannot be read; names it.
    """
    recipe = _mapping(folder / RECIPE)
    adapter = _mapping(folder / "adapter_config.json")
    logged = _mapping(folder / STATE).get("log_history")
    trained = str(recipe.get("model_name_or_path") or "")
    base = str(adapter.get("base_model_name_or_path") or trained)
    if trained and base.endswith(f"/{trained}"):  # the same, with where it lies on this machine
        base = trained
    return CardFacts(
        model_id=model_id,
        is_adapter=bool(adapter),
        base_model=base,
        recipe=recipe,
        evaluation=of_model(_mapping(folder / EVALUATION), folder),
        history=[entry for entry in logged if isinstance(entry, dict)] if isinstance(logged, list) else [],
    )


def _mapping(path: Path) -> dict[str, Any]:
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


def read_card(folder: Path) -> str:
    """The card of a directory; empty if there is none.

    Raises:
        ValueError: it is no text in UTF-8.
    """
    path = folder / CARD
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read ({error}). Write it again in UTF-8, or remove it.") from error


def make_card(facts: CardFacts, before: str = "") -> str:
    """The text of the card.

    Args:
        facts: of the run.
        before: the card so far; empty if there is none.

    Raises:
        ValueError: the metadata of that card is no YAML.
    """
    metadata, body = split_card(before)
    metadata = complete_metadata(metadata, facts)
    if not body.strip():
        body = _new_body(facts)
    options = agent_options(facts.recipe, facts.env_factory)
    quick = quick_start_section(facts.model_id, facts.recipe, facts.env_factory)
    body = body.replace('model="None"', f'model="{facts.model_id}"')  # TRL's, before there is a repository
    body = _LINK.sub(lambda link: link[0] if is_hub_id(link[1]) else markdown_code(link[1]), body)
    made = [("Quick start", quick)] if options or facts.env_factory is not None or not before else []
    made += [("Data", sections.data_section(facts.data))]
    made += [("Results", results_section(facts.evaluation, facts.evaluated_on))]
    made += [("Training curves", _curves_section(facts.curves))]
    for heading, text in made:
        body = with_section(body, heading, text, is_first=heading == "Quick start")
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=10_000)
    return f"---\n{header}---\n\n{body.strip()}\n"


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Metadata and body of a card.

    Raises:
        ValueError: the metadata is no YAML.
    """
    match = _HEADER.match(text.replace("\r\n", "\n"))
    if match is None:
        return {}, text
    try:
        metadata = yaml.safe_load(match.group(1)) or {}
        if not isinstance(metadata, dict):
            raise ValueError("it is no mapping")
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{CARD}: the metadata at the top is no YAML ({problem}). Correct or remove it.") from error
    return metadata, text.replace("\r\n", "\n")[match.end() :]


def with_section(body: str, heading: str, text: str, *, is_first: bool = False) -> str:
    r"""The body with a section of second level in the place of the one with that heading, else in front of citations.

    Args:
        body: of a card.
        heading: of the section.
        text: of the section, heading included; empty: the body stays.
        is_first: a new section stands in front of all others.

    >>> with_section("# A\n\n## Results\n\nold\n\n## Citations\n", "Results", "## Results\n\nnew")
    '# A\n\n## Results\n\nnew\n\n## Citations\n'
    """
    if not text:
        return body
    place = re.search(rf"^## {re.escape(heading)}[ \t]*$", body, re.MULTILINE)
    if place is not None:
        rest = body[place.end() :]
        after = re.search(r"^## ", rest, re.MULTILINE)
        end = place.end() + (after.start() if after else len(rest))
        return f"{body[: place.start()]}{text}\n\n{body[end:]}"
    after = re.search(r"^## " if is_first else r"^## Citations?[ \t]*$", body, re.MULTILINE)
    if after is None:
        return f"{body.rstrip()}\n\n{text}\n"
    return f"{body[: after.start()].rstrip()}\n\n{text}\n\n{body[after.start() :]}"


# ---------------------------------------------------------------- metadata


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
    if index := model_index(facts.model_id.rpartition("/")[2], facts.evaluation, facts.evaluated_on):
        done["model-index"] = index
    done = {name: value for name, value in done.items() if value not in (None, "", [])}
    return dict(shown_all(done))


# ---------------------------------------------------------------- a card where there was none


def _new_body(facts: CardFacts) -> str:
    from agent_r1_trl.advantages.lookup import find_estimator

    recipe = facts.recipe
    name = recipe.get("advantage_estimator")
    try:
        estimator = find_estimator(str(name), has_critic=recipe.get("trainer") == "ppo") if name else None
    except ValueError:  # one of the user's own
        estimator = None
    base = f" from {markdown_code(facts.base_model)}" if facts.base_model else ""
    kind = "A PEFT adapter" if facts.is_adapter else "A language model"
    parts = [
        f"# {markdown(facts.model_id.rpartition('/')[2])}",
        f"{kind} that was trained{base} to use tools over many turns, with reinforcement learning "
        "(agent-r1-trl, on top of [TRL](https://github.com/huggingface/trl)).",
    ]
    if recipe.get("env"):
        parts.append(sections.environment_section(str(recipe["env"])))
    if facts.tools:
        parts.append(sections.tools_section(facts.tools))
    parts += [
        sections.settings_section({key: value for key, value in recipe.items() if value is not None}, estimator),
        sections.metrics_section(facts.history),
        sections.method_section(estimator),
        f"## Citations\n\n```bibtex\n{sections.AGENT_R1['citation']}\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def _curves_section(image: str) -> str:
    return f"## Training curves\n\n![Logged values over the steps of the training]({image})" if image else ""
