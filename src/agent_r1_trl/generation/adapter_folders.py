"""PEFT adapters on disk and on the Hub: which path is one, and what to do with it where a whole model is needed."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path


def has_file(path: str, name: str) -> bool:
    """Whether a directory, or a repository of the Hub, holds a file.

    Raises:
        OSError: it is no directory, and the Hub knows no such repository or cannot be reached.
    """
    if Path(path).is_dir():
        return (Path(path) / name).is_file()
    from transformers.utils.hub import cached_file

    return cached_file(path, name, _raise_exceptions_for_missing_entries=False) is not None


def is_adapter(path: str) -> bool:
    """Whether a directory, or a repository of the Hub, holds a PEFT adapter."""
    return has_file(path, "adapter_config.json")


def check_whole_model(path: object, *, flag: str) -> None:
    """Refuse an adapter where training starts from a model; a model that is loaded already passes.

    Raises:
        ValueError: names its base and both ways on.
    """
    if not isinstance(path, str):
        return
    has_adapter = False
    with contextlib.suppress(OSError, ValueError):  # no such path, no connection: said when the model is loaded
        has_adapter = is_adapter(path)
    if has_adapter:
        raise ValueError(_ways_on(path, flag=flag))


def _ways_on(path: str, *, flag: str) -> str:
    """The message about an adapter at `path`, the value of `flag`, where training needs a whole model."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(path)
    kind = getattr(config.peft_type, "value", config.peft_type)
    base = config.base_model_name_or_path
    merged = f"{path.rstrip('/')}-merged" if Path(path).is_dir() else "outputs/merged"
    command = shlex.join(["agent-r1-trl", "merge", path, "--output_dir", merged])
    return (
        f"{flag}={path!r} is an adapter ({kind}) of the model {base!r}, and training starts from a whole model. "
        f"Either merge it and train the result: {command}, then set "
        f"{flag}={merged!r}. "
        "Or train the adapter on, in a script: MultiTurnGRPOTrainer(model=PeftModel.from_pretrained("
        f"AutoModelForCausalLM.from_pretrained({base!r}), {path!r}, is_trainable=True), ...)."
    )
