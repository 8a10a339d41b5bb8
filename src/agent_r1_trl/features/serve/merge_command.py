"""`agent-r1-trl merge`: write a plain Hugging Face model from an adapter or a checkpoint.

agent-r1-trl merge outputs/my-agent --output_dir outputs/my-agent-merged

The result loads in transformers, vLLM and other programs without peft or this package; critics are left out.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1_trl.cli.arguments import DTYPES
from agent_r1_trl.cli.errors import DependencyError, PlainParser, loading
from agent_r1_trl.recording.lines import check_is_new

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

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

    source = arguments.model
    target = Path(arguments.output_dir)
    trust = arguments.trust_remote_code
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
        raise DependencyError(
            f"output_dir={str(target)!r}: cannot be written ({error}). Free space there, or set another output_dir."
        ) from error
    done = "adapter merged into its base" if is_adapter else "copied"
    return f"{target}: {model.num_parameters():,} parameters, {dtype}; {done}"


def _merged(peft_model: PeftModel, source: str) -> PreTrainedModel:
    """The base model with the adapter added to its weights."""
    import torch

    base = peft_model.get_base_model()
    was_tied = base.config.get_text_config().tie_word_embeddings
    shared = _separate_weights(peft_model)
    try:
        model = peft_model.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        fix = "Pass the adapter as it is to agent-r1-trl serve, chat or eval."
        if "NaN" in str(error):
            fix = "Pass an earlier checkpoint, whose weights are finite."
        raise ValueError(f"model={source!r}: {str(error).rstrip('.')}. {fix}") from error
    for names in shared:
        _share_again(model, names, source)
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if not was_tied or outputs is None:
        return model
    is_tied = torch.equal(inputs.weight, outputs.weight)
    if is_tied:
        outputs.weight = inputs.weight
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = is_tied  # two that differ are both saved
    return model


def _separate_weights(peft_model: PeftModel) -> list[list[str]]:
    """Give layers that share a weight one each: embeddings and output layer, and others that a family ties.

    peft adds in place, so that the adapter of one layer would change the others as well.

    Returns:
        Names of weights that the model's class ties, other than the ends: for each the layers that have it. None of
        `layer_replication`, whose copies are layers of their own once they are merged.
    """
    import torch

    base = peft_model.get_base_model()
    has_copies = any(getattr(config, "layer_replication", None) for config in peft_model.peft_config.values())
    of_embeddings = {id(parameter) for parameter in base.get_input_embeddings().parameters()}
    names: dict[int, list[str]] = {}
    for name, parameter in list(base.named_parameters(remove_duplicate=False)):
        others = names.setdefault(id(parameter), [])
        if others:
            path, _, own_name = name.rpartition(".")
            copied = torch.nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(base.get_submodule(path), own_name, copied)
        others.append(name.replace(".base_layer.", "."))
    if has_copies:
        return []
    return [found for key, found in names.items() if len(found) > 1 and key not in of_embeddings]


def _share_again(model: PreTrainedModel, names: Sequence[str], source: str) -> None:
    """Make the layers of a family that ties them share one weight again.

    Raises:
        ValueError: the adapter has made several of it, of which loading would take one for all.
    """
    import torch

    first = model.get_parameter(names[0])
    for name in names[1:]:
        if not torch.equal(model.get_parameter(name), first):
            raise ValueError(
                f"model={source!r}: in {type(model).__name__} {names[0]} and {name} share one weight, and the adapter "
                "adds something else to each, for which a merged model has no place. Pass the adapter as it is to "
                "agent-r1-trl serve, chat or eval."
            )
        path, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(path), own_name, first)
