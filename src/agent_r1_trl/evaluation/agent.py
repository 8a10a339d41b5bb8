"""A model that is ready to sample: found, and loaded once for as many evaluations as there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agent_r1_trl.generation as generation
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation.adapter_folders import has_file, is_adapter
from agent_r1_trl.generation.base import Generator
from agent_r1_trl.generation.rotary import fix_rotary_embeddings, vllm_default_length
from agent_r1_trl.rollout import RolloutLimits, context_length
from agent_r1_trl.rollout.context_policies import STRIP_POLICY

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(kw_only=True)
class Agent:
    """The parts of a model that an evaluation needs."""

    name: str | None
    """Directory or Hub id, or a hosted model and where it is; None for a model that was loaded by the caller."""
    generator: Generator
    """Or the `Endpoint` of a hosted model."""
    chat: Any
    """`ChatFormat`; None for a hosted model."""
    limits: RolloutLimits
    """The limits asked for, with the model's context length."""


@contextlib.contextmanager
def open_agent(
    model: str | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    use_vllm: bool = False,
    limits: RolloutLimits | None = None,
    dtype: str | None = None,
    max_batch_size: int = 64,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    response_template: dict[str, Any] | str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Iterator[Agent]:
    """Load a model, on a GPU if there is one, and close its generator at the end.

    Args:
        model: directory or Hub id of a model or of a PEFT adapter; or a loaded model (then pass `tokenizer`).
        tokenizer: None loads the one saved with the model.
        use_vllm: sample with vLLM in this process instead of transformers.
        limits: of a trajectory; the model's context length is a limit as well.
        dtype: "float32", "bfloat16", ... None: the checkpoint's own on a GPU, float32 on a CPU.
        max_batch_size: maximum number of rows per forward pass (transformers only).
        trust_remote_code: run code that comes with the model.
        chat_template: of `ChatFormat`, like the two that follow.
        response_template: the same.
        chat_template_kwargs: the same.

    Raises:
        ValueError: there is no such model, or a loaded model comes without `tokenizer`.
    """
    policy: Any = model
    name = None if hasattr(model, "parameters") else str(model)
    if name is not None:
        # vLLM reads a plain checkpoint itself; an adapter is merged into its base on the way in.
        policy, tokenizer = load_agent(
            name, dtype=dtype, tokenizer=tokenizer, trust_remote_code=trust_remote_code, to_device=not use_vllm
        )
    if tokenizer is None:
        raise ValueError("tokenizer=None: a loaded model comes without its tokenizer. Pass tokenizer= as well.")
    limits = limits or RolloutLimits()
    eos = getattr(policy.generation_config, "eos_token_id", None)  # further tokens that end a turn
    chat = ChatFormat(
        tokenizer,
        chat_template=chat_template,
        response_template=response_template,
        chat_template_kwargs=chat_template_kwargs,
        strips_reasoning=limits.context.policy == STRIP_POLICY,
        extra_stop_token_ids=[eos] if isinstance(eos, int) else list(eos or []),
    )
    if limits.max_model_length is None:
        lengths = [context_length(policy.config), vllm_default_length(policy.config) if use_vllm else None]
        limits = replace(limits, max_model_length=min((item for item in lengths if item is not None), default=None))
    fix_rotary_embeddings(policy, limits.max_model_length, keeps_choice=True)
    generator: Generator
    stop_ids = chat.stop_token_ids
    if use_vllm:
        generator = generation.VLLMGenerator(policy, stop_token_ids=stop_ids, max_model_len=limits.max_model_length)
    else:
        generator = generation.TransformersGenerator(
            policy, pad_token_id=tokenizer.pad_token_id, stop_token_ids=stop_ids, max_batch_size=max_batch_size
        )
    try:
        yield Agent(name=name, generator=generator, chat=chat, limits=limits)
    finally:
        generator.close()


# ---------------------------------------------------------------- loading


def load_agent(
    path: str,
    *,
    dtype: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
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

    has_adapter = check_model_folder(path) or is_adapter_of_the_hub(path)
    has_gpu = torch.cuda.is_available()
    kind: Any = AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM
    kept = "auto" if has_gpu else torch.float32
    model = kind.from_pretrained(path, dtype=dtype or kept, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        has_own = not has_adapter or has_file(path, "tokenizer_config.json")
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
        raise ValueError(
            f"{flag}={path!r}: the directory holds neither config.json (a model) nor adapter_config.json (a PEFT "
            f"adapter). Pass the directory that save_model or a checkpoint wrote.{newest_checkpoint_hint(folder)}"
        )
    return False


def newest_checkpoint_hint(folder: Path) -> str:
    """A question that names the newest checkpoint in a folder that is no model; "" if it has none."""
    inside = [item.parent for item in folder.glob("checkpoint-*/*config.json")]
    inside.sort(key=lambda place: (len(place.name), place.name))  # 10 after 8
    return f" Did you mean {inside[-1]}?" if inside else ""


def is_adapter_of_the_hub(path: str) -> bool:
    """Whether a Hub id, and no directory, is that of a PEFT adapter."""
    return not Path(path).is_dir() and is_adapter(path)
