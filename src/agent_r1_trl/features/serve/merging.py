"""Plain Hugging Face models from what training leaves: adapters are merged, critics left out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from agent_r1_trl.evaluation.loading import check_model_folder, is_adapter_of_the_hub, load_agent


def merge_model(
    source: str, output_dir: str, *, dtype: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Write a model that transformers, vLLM and other programs load without peft or this package.

    An adapter is added to its base in float32 and rounded once. The source is left as it is.

    Args:
        source: directory of a model, an adapter or a checkpoint; or a Hub id.
        output_dir: a directory that does not exist yet, or is empty.
        dtype: of the weights that are written, such as "bfloat16". None: that of the source; of an adapter, that of
            its base.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        What was done: `kind` ("adapter" or "model"), `dtype`, `num_parameters`.

    Raises:
        ValueError: there is no model in `source`, or something in `output_dir`.
        OSError: the base model cannot be loaded, or the result cannot be written.
    """
    import torch

    target = Path(output_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"output_dir={output_dir!r} is not empty. Pass a directory that does not exist yet.")
    is_adapter = check_model_folder(source) or is_adapter_of_the_hub(source)
    dtype = dtype or _dtype_of(source, is_adapter, trust_remote_code)
    loaded = "float32" if is_adapter else dtype
    model, tokenizer = load_agent(
        source, dtype=loaded, trust_remote_code=trust_remote_code, to_device=False, keep_pad_token=True
    )
    if is_adapter:
        model = _merged(model, source)
    model = model.to(getattr(torch, str(dtype)))
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if target.exists():
        target.rmdir()
    unfinished.rename(target)
    return {
        "kind": "adapter" if is_adapter else "model",
        "dtype": str(dtype),
        "num_parameters": model.num_parameters(),
    }


def _dtype_of(source: str, is_adapter: bool, trust_remote_code: bool) -> str:
    from transformers import AutoConfig

    if is_adapter:
        from peft import PeftConfig

        source = PeftConfig.from_pretrained(source).base_model_name_or_path
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    return str(config.dtype or "float32").removeprefix("torch.")


def _merged(peft_model: Any, source: str) -> Any:
    """The base model with the adapter added to its weights.

    Raises:
        ValueError: the adapter holds NaN.
    """
    from torch import nn

    base = peft_model.get_base_model()
    outputs = base.get_output_embeddings()
    if hasattr(outputs, "get_base_layer"):  # peft would add the output layer's adapter to tied embeddings as well
        layer = outputs.get_base_layer()
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    try:
        model = peft_model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ValueError(
            f"model={source!r}: {error}. Pass an earlier checkpoint, whose weights are finite."
        ) from error
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is not None and outputs.weight.data_ptr() != inputs.weight.data_ptr():
        model.config.tie_word_embeddings = False  # they are two now, and both are saved
    return model
