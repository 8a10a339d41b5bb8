"""What leaves the machine or reaches the log beside the model: no trajectories unless asked, and no rows of data.

transformers uploads the whole `output_dir`, and TRL logs the whole row that no reward function scored. Both may hold
data that is private, or huge.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1_trl.trainers.model_card import add_sections

PRIVATE_FILES = ["journal/*"]
"""Patterns of files in `output_dir` that are never uploaded; `*` matches subfolders as well."""
TRAJECTORY_FILES = ["trajectories/*", "completions/*"]
"""Those that are uploaded with `push_trajectories` only."""

_UNSCORED = "All reward functions returned None"


class Publishing:
    """The Trainer's methods that write the model card and upload `output_dir`; see `push_trajectories`."""

    args: Any

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """TRL's card with our sections in it."""
        super().create_model_card(  # type: ignore[misc]
            model_name or Path(self.args.output_dir).name, dataset_name, tags
        )
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            add_sections(Path(self.args.output_dir) / "README.md", self)  # type: ignore[arg-type]

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's upload, without recorded trajectories unless `push_trajectories` is set."""
        with self._without_private_files():
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with self._without_private_files():
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _without_private_files(self) -> Any:
        is_asked = getattr(self.args, "push_trajectories", False)
        return ignored_in_uploads(PRIVATE_FILES if is_asked else [*PRIVATE_FILES, *TRAJECTORY_FILES])


@contextlib.contextmanager
def ignored_in_uploads(patterns: list[str]) -> Iterator[None]:
    """While it lasts, transformers' uploads of folders ignore these patterns, too."""
    from transformers.utils.hub import hf_api

    api: Any = hf_api()
    upload_folder = api.upload_folder

    def upload(*args: Any, ignore_patterns: Any = None, **kwargs: Any) -> Any:
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or [])
        return upload_folder(*args, ignore_patterns=[*given, *patterns], **kwargs)

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
