"""What leaves the machine or reaches the log beside the model: no secrets, no rows, trajectories only if asked.

transformers uploads the whole `output_dir`, and TRL logs the whole row that no reward function scored. Both may hold
data that is private, or huge.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent_r1_trl.publishing.card import CARD, make_card, read_facts
from agent_r1_trl.publishing.curves import IMAGE, draw_curves
from agent_r1_trl.publishing.quick_start import READ_SETTINGS
from agent_r1_trl.secret_scan import SecretFoundError, check_files
from agent_r1_trl.trainers.model_card import add_sections

logger = logging.getLogger(__name__)

PRIVATE_FILES = ["journal/*", "training_args.bin"]
"""Patterns of files in `output_dir` that are never uploaded; `*` matches subfolders as well. The arguments are a
pickle that holds `hub_token`."""
TRAJECTORY_FILES = ["trajectories/*", "completions/*"]
"""Those that are uploaded with `push_trajectories` only."""
CRITIC_FILES = ["critic/*"]
"""Those that are uploaded with `push_critic` only."""

_UNSCORED = "All reward functions returned None"


class Publishing:
    """The Trainer's methods that write the model card and upload `output_dir`; see `push_trajectories`."""

    args: Any
    state: Any
    env_factory: Any
    hub_model_id: str | None

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """TRL's card with our sections in it."""
        super().create_model_card(  # type: ignore[misc]
            model_name or Path(self.args.output_dir).name, dataset_name, tags
        )
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            path = Path(self.args.output_dir) / CARD
            add_sections(path, self)  # type: ignore[arg-type]
            try:
                path.write_text(self._finished_card(path), encoding="utf-8")
            except ValueError as error:  # of an evaluation.json, say: not worth the training
                logger.warning("The model card is not complete: %s", error)

    def _finished_card(self, path: Path) -> str:
        """The card with a quick start, data, results, and without what the Hub would refuse."""
        facts = read_facts(path.parent, getattr(self, "hub_model_id", None) or self.args.output_dir)
        facts.env_factory = self.env_factory
        for name in READ_SETTINGS:
            facts.recipe.setdefault(name, getattr(self.args, name, None))
        facts.curves = IMAGE if (path.parent / IMAGE).is_file() else ""
        return make_card(facts, path.read_text(encoding="utf-8"))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's upload, without recorded trajectories unless `push_trajectories` is set.

        Raises:
            SecretFoundError: something in a file looks like a secret; nothing was sent.
        """
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            draw_curves(self.state.log_history, Path(self.args.output_dir) / IMAGE)
        with self._uploads_checked():
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        try:
            with self._uploads_checked():
                super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]
        except SecretFoundError as error:  # not worth the training
            logger.error("The checkpoint was not uploaded, and training goes on. %s", error)

    def _uploads_checked(self) -> Any:
        left_out = [*PRIVATE_FILES]
        left_out += [] if getattr(self.args, "push_trajectories", False) else TRAJECTORY_FILES
        left_out += [] if getattr(self.args, "push_critic", False) else CRITIC_FILES
        allowed = getattr(self.args, "allow_secrets", None) or []

        def check(files: dict[str, Path]) -> None:
            check_files(files, allowed=allowed, cure="allow_secrets:")

        return checked_uploads(left_out, check)


@contextlib.contextmanager
def checked_uploads(patterns: list[str], check: Callable[[dict[str, Path]], None]) -> Iterator[None]:
    """While it lasts, transformers' uploads of folders ignore these patterns, too, and are checked before they begin.

    Args:
        patterns: of names in the folder.
        check: is called with name -> path of what would be uploaded, and raises if it must not be.
    """
    from huggingface_hub.utils import filter_repo_objects
    from transformers.utils.hub import hf_api

    api: Any = hf_api()
    upload_folder = api.upload_folder

    def upload(*args: Any, folder_path: Any, ignore_patterns: Any = None, **kwargs: Any) -> Any:
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or [])
        ignored, folder = [*given, *patterns], Path(folder_path)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        check({name: folder / name for name in filter_repo_objects(names, ignore_patterns=ignored)})
        return upload_folder(*args, folder_path=folder_path, ignore_patterns=ignored, **kwargs)

    api.upload_folder = upload  # hides the method of the class, on this object
    try:
        yield
    finally:
        del api.upload_folder


@contextlib.contextmanager
def rows_not_logged() -> Iterator[None]:
    """While it lasts, TRL's warning about a row that no reward function scored does not contain the row."""

    def shorten(record: logging.LogRecord) -> bool:
        if _UNSCORED in str(record.msg):
            record.msg, record.args = (
                f"{_UNSCORED} for at least one trajectory (None is also the reward of an infrastructure failure). It "
                "is not in the baseline.",
                (),
            )
        return True

    logger = logging.getLogger("trl.trainer.grpo_trainer")
    logger.addFilter(shorten)
    try:
        yield
    finally:
        logger.removeFilter(shorten)
