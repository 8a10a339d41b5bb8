"""Loading a trained agent: model and tokenizer of a directory or Hub id, PEFT adapters included.

Not part of the data flow: what `evaluate_model` and the command line start from.
"""

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
) -> tuple[Any, Any]:
    """Model (in eval mode) and tokenizer of a directory or Hub id; PEFT adapters are loaded onto their base model.

    Raises:
        ValueError: a local directory that holds neither; names the checkpoints inside it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_adapter = check_model_folder(path)
    has_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "dtype": dtype or ("auto" if has_gpu else torch.float32),
        "trust_remote_code": trust_remote_code,
    }
    if is_adapter:
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(path, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    if tokenizer is None:
        source = path
        if is_adapter and not (Path(path) / "tokenizer_config.json").exists():
            source = model.peft_config["default"].base_model_name_or_path
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if to_device and has_gpu:
        model = model.to("cuda")
    return model.eval(), tokenizer


def is_local(path: str, *, flag: str = "model") -> bool:
    """Whether it is a directory; a name that cannot be one is taken for a Hub id.

    Raises:
        ValueError: a path, and no directory is there; names flag, value and cure.
    """
    folder = Path(path)
    if not folder.is_dir() and (folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1):
        raise ValueError(f"{flag}={path!r}: no such directory. Pass the directory of a saved model, or a Hub id.")
    return folder.is_dir()


def check_model_folder(path: str, *, flag: str = "model") -> bool:
    """Whether it is an adapter; a name that is no local directory is taken for a Hub id.

    Raises:
        ValueError: a local path that holds no model; names flag, value and cure.
    """
    folder = Path(path)
    if not is_local(path, flag=flag):
        return False
    if (folder / "adapter_config.json").exists():
        return True
    if not (folder / "config.json").exists():
        inside = sorted(str(item.parent) for item in folder.glob("checkpoint-*/*config.json"))
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        raise ValueError(
            f"{flag}={path!r}: the directory holds neither config.json (a model) nor adapter_config.json (a PEFT "
            f"adapter). Pass the directory that save_model or a checkpoint wrote.{hint}"
        )
    return False
