"""Load a trained agent, model and tokenizer, for `evaluate_model` and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_agent(
    path: str,
    *,
    dtype: str | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    to_device: bool = True,
    keep_pad_token: bool = False,
) -> tuple[Any, Any]:
    """Model (in eval mode) and tokenizer of a directory or Hub id; a PEFT adapter is loaded onto its base model.

    `dtype` and `tokenizer` are by default those of the checkpoint (float32 on a CPU). A tokenizer without padding
    token gets one, unless `keep_pad_token`; the model goes to the GPU where there is one, if `to_device`.

    Raises:
        ValueError: see `check_model_folder`.
        OSError: it, or the base of an adapter, cannot be loaded.
    """
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_adapter = check_model_folder(path) or is_adapter_of_the_hub(path)
    has_gpu = torch.cuda.is_available()
    kind: Any = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    kept = "auto" if has_gpu else torch.float32
    model = kind.from_pretrained(path, dtype=dtype or kept, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        has_own = not is_adapter or _has_file(path, "tokenizer_config.json")
        source = path if has_own else model.peft_config["default"].base_model_name_or_path
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None and not keep_pad_token:
        tokenizer.pad_token = tokenizer.eos_token
    if to_device and has_gpu:
        model = model.to("cuda")
    return model.eval(), tokenizer


def is_local(path: str, *, flag: str = "model") -> bool:
    """Whether `path` is a directory; otherwise it is taken for a Hub id if it can be one (`outputs/...` cannot).

    Raises:
        ValueError: it cannot be a Hub id, and there is no such directory.
    """
    folder = Path(path)
    is_of_a_run = path.startswith("outputs/")  # as all pages and recipes have it
    is_meant_here = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or is_of_a_run
    if not folder.is_dir() and is_meant_here:
        is_made = is_of_a_run and path.endswith("/start")
        hint = " What a recipe starts from is made by the script that it names above this setting." if is_made else ""
        raise ValueError(
            f"{flag}={path!r}: no such directory (looked in {Path.cwd()}). Pass the directory of a saved model, or a "
            f"Hub id.{hint}"
        )
    return folder.is_dir()


def check_model_folder(path: str, *, flag: str = "model") -> bool:
    """Whether `path` is a directory with a PEFT adapter; False for a full model and for a Hub id.

    Raises:
        ValueError: the directory does not exist or holds no model; names the checkpoints inside it.
    """
    folder = Path(path)
    if not is_local(path, flag=flag):
        return False
    if (folder / "adapter_config.json").exists():
        return True
    if not (folder / "config.json").exists():
        inside = [item.parent for item in folder.glob("checkpoint-*/*config.json")]
        inside.sort(key=lambda place: (len(place.name), place.name))  # 10 after 8
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        raise ValueError(
            f"{flag}={path!r}: the directory holds neither config.json (a model) nor adapter_config.json (a PEFT "
            f"adapter). Pass the directory that save_model or a checkpoint wrote.{hint}"
        )
    return False


def is_adapter_of_the_hub(path: str) -> bool:
    """Whether a Hub id, and no directory, is that of a PEFT adapter."""
    return not Path(path).is_dir() and _has_file(path, "adapter_config.json")


def _has_file(path: str, name: str) -> bool:
    """Whether a directory, or a repository of the Hub, holds a file."""
    if Path(path).is_dir():
        return (Path(path) / name).is_file()
    from transformers.utils.hub import cached_file

    return cached_file(path, name, _raise_exceptions_for_missing_entries=False) is not None
