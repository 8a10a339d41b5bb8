"""`agent-r1-trl merge`: write a plain Hugging Face model from an adapter or a checkpoint.

agent-r1-trl merge outputs/my-agent --output_dir outputs/my-agent-merged

The result loads in transformers, vLLM and other programs without peft or this package; critics are left out.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.arguments import DTYPES
from agent_r1_trl.cli.errors import DependencyError, PlainParser, loading
from agent_r1_trl.recording.lines import check_is_new

COMMAND = "agent-r1-trl merge"


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(COMMAND, __doc__.partition(": ")[2].partition("\n\nThe result")[0])
    parser.add_argument("model", metavar="MODEL", help="Directory of a model, adapter or checkpoint, or a Hub id.")
    output = "Where the model is written; it must not exist yet."
    parser.add_argument("--output_dir", required=True, metavar="DIR", help=output)
    dtype = "Of the weights. Not set: that of the model, or of the adapter's base."
    parser.add_argument("--dtype", choices=DTYPES[1:], help=dtype)
    parser.add_argument("--trust_remote_code", action="store_true", help="Let code that comes with the model run.")
    return parser


def run(argv: Sequence[str]) -> int:
    """Write the model; returns the exit code."""
    arguments = make_parser().read(argv)
    with loading(arguments.model):
        print(_merge(arguments))
    return 0


def _merge(arguments: argparse.Namespace) -> str:
    """Write the model and say what was done. An adapter is added to its base in float32, and rounded once."""
    import torch
    from peft import PeftConfig
    from safetensors import SafetensorError
    from transformers import AutoConfig

    from agent_r1_trl.evaluation.agent import check_model_folder, is_adapter_of_the_hub, load_agent

    source, target, trust = arguments.model, Path(arguments.output_dir), arguments.trust_remote_code
    check_is_new("output_dir", target)
    is_adapter = check_model_folder(source) or is_adapter_of_the_hub(source)
    base = PeftConfig.from_pretrained(source).base_model_name_or_path if is_adapter else source
    dtype = arguments.dtype
    if dtype is None:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust)
        dtype = str(config.dtype or "float32").removeprefix("torch.")
    loaded = "float32" if is_adapter else dtype
    model, tokenizer = load_agent(source, dtype=loaded, trust_remote_code=trust, to_device=False, keep_pad_token=True)
    model = (_merged(model, source) if is_adapter else model).to(getattr(torch, dtype))
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:  # a full disk, no permission
        raise DependencyError(f"output_dir={str(target)!r}: cannot be written ({error}).") from error
    done = "adapter merged into its base" if is_adapter else "copied"
    return f"{target}: {model.num_parameters():,} parameters, {dtype}; {done}"


def _merged(peft_model: Any, source: str) -> Any:
    """The base model with the adapter added to its weights."""
    from torch import nn

    outputs = peft_model.get_base_model().get_output_embeddings()
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
