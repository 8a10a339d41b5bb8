"""Uploads to the Hub: the files of a run, and the card that describes them.

transformers uploads the whole `output_dir`, which may hold data that is private, or huge: what leaves is searched for
secrets, and trajectories and critic go along only if asked for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.settings import plain, plain_value

if TYPE_CHECKING:
    from agent_r1_trl.trainers.construction import TrainRows
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

LEFT_OUT = {
    # The arguments are a pickle that holds `hub_token`; the adapter is the one that vLLM's servers sample with now.
    "": ["journal/*", "training_args.bin", "vllm_adapter/*"],
    "push.trajectories": ["trajectories/*", "completions/*", "*.html"],  # the inspector's pages hold them
    "push.critic": ["critic/*"],
}
"""Setting -> patterns of files in `output_dir` that are uploaded with it only; `*` matches subfolders as well. They
hold in its folders, too: an evaluation with several rows leaves one for each."""
VERSIONS = "### Framework versions\n\n"
logger = logging.getLogger(__name__)


def make_callbacks(config: object, train_dataset: TrainRows) -> list[Any]:
    """None: it takes no part in the steps of a run."""
    return []


def finish_card(trainer: MultiTurnTrainer, path: Path) -> None:
    """Add what is known of the run to the card that TRL wrote at `path`, and take out what the Hub would refuse."""
    from agent_r1_trl import __version__
    from agent_r1_trl.environments.factory import env_name, tool_schemas
    from agent_r1_trl.features.hub.card import READ_SETTINGS, SETTINGS, make_card, read_facts

    args, factory = trainer.args, trainer.env_factory
    try:
        facts = read_facts(path.parent, getattr(trainer, "hub_model_id", None) or f"./{Path(args.output_dir).name}")
    except ValueError as error:  # of an evaluation.json, say: not worth the training
        logger.warning("The model card is not complete: %s", error)
        return
    facts.env = ""
    facts.estimator = args.estimator
    facts.history = trainer.state.log_history
    for name in READ_SETTINGS:
        facts.recipe.setdefault(name, plain(getattr(args, name, None)))
    if factory is not None:
        facts.env, facts.tools = env_name(factory), tool_schemas(factory)
        facts.recipe.setdefault("env", None if facts.recipe.get("tools") else _import_path(factory))
        facts.recipe |= {
            name: getattr(args, name) for name in (*SETTINGS, *args.estimator.options) if hasattr(args, name)
        }
    card = path.read_text(encoding="utf-8")
    # TRL's template links to the base model, also where a local folder has no page on the Hub.
    card = card.replace("[None](https://huggingface.co/None)", "a local checkpoint")
    card = card.replace(VERSIONS, f"{VERSIONS}- Agent-R1-TRL: {__version__}\n- PEFT: {version('peft')}\n")
    path.write_text(make_card(facts, card, in_full=True), encoding="utf-8")


def _import_path(factory: object) -> str | None:
    """Where a reader finds the class of an environment, or a function that makes it; None where nobody can."""
    module = getattr(factory, "__module__", "__main__")
    name = getattr(factory, "__qualname__", "")
    is_importable = module != "__main__" and name.isidentifier()
    return f"{module}.{name}" if is_importable else None


@contextlib.contextmanager
def uploads_checked(args: Any) -> Iterator[None]:
    """While it lasts, transformers' uploads of folders leave out what is not asked for, and refuse secrets."""
    from huggingface_hub.utils import filter_repo_objects
    from transformers.utils.hub import hf_api

    from agent_r1_trl.features.hub.secret_scan import check_files

    api: Any = hf_api()
    upload_folder = api.upload_folder
    left_out: list[str] = []
    for name, patterns in LEFT_OUT.items():
        is_asked_for = name and plain_value(args, name)
        if not is_asked_for:
            for pattern in patterns:
                left_out += [pattern, f"*/{pattern}"]

    def upload(*others: object, folder_path: Any, ignore_patterns: Any = None, **kwargs: object) -> Any:
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or [])
        ignored = [*given, *left_out]
        folder = Path(folder_path)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        files = {name: folder / name for name in filter_repo_objects(names, ignore_patterns=ignored)}
        check_files(files, allowed=args.push.allow_secrets or [], fix="push.allow_secrets:")
        return upload_folder(*others, folder_path=folder_path, ignore_patterns=ignored, **kwargs)

    api.upload_folder = upload  # hides the method of the class, on this object
    try:
        yield
    finally:
        del api.upload_folder
