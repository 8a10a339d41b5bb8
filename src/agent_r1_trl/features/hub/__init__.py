"""What is sent to the Hub: the files of a run, and the card that describes them."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def make_callbacks(config: Any, train_dataset: Any) -> list[Any]:
    """None: it takes no part in the steps of a run."""
    return []


def finish_card(trainer: Any, path: Path) -> None:
    """Put environment, tools, settings, data and results into the card that TRL wrote.

    Args:
        trainer: whose card it is.
        path: of the card.
    """
    from agent_r1_trl.features.hub.uploads import complete_card

    try:
        complete_card(trainer, path)
    except ValueError as error:  # of an evaluation.json, say: not worth the training
        logger.warning("The model card is not complete: %s", error)


def uploads_checked(args: Any) -> contextlib.AbstractContextManager[None]:
    """While it lasts, nothing private is uploaded.

    Args:
        args: of the trainer.
    """
    from agent_r1_trl.features.hub import uploads

    return uploads.uploads_checked(args)
