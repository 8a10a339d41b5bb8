"""Start vLLM inside this process, on a CPU or a GPU, and shut it down again.

Covered here: engine options, environment variables, vLLM's traps on a CPU. Not covered: requests and weights
(`generator.py`). vLLM is imported inside the functions.
"""

from __future__ import annotations

import copy
import gc
import importlib
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import LLMEngine


def build_engine(model: str | PreTrainedModel, **options: object) -> Any:
    """A `vllm.LLMEngine` in this process whose weights can be replaced.

    Args:
        model: checkpoint path or Hub name; or a transformers or PEFT model, of which only the configuration is taken
            (the weights are random until the first sync).
        options: of `vllm.EngineArgs`; they win over the defaults chosen here.
    """
    is_cpu = not torch.cuda.is_available()
    if is_cpu:
        # vLLM's own default asks for most of the machine's memory; binding threads to cores would slow the trainer.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with _single_process_group(), _shared_draws_kept(), tempfile.TemporaryDirectory() as folder:
        from vllm import EngineArgs, LLMEngine

        if torch.distributed.is_initialized():
            _keep_process_group()
        if is_cpu:
            keep_weights_loadable()
            _draw_from_seeds_alone()
        settings: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            # Keeps engine and model in this process, next to the trainer's own process group.
            "distributed_executor_backend": "external_launcher",
            # Log-probabilities under the temperature and the filters, as the sampler used them.
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": is_cpu,  # compiling takes minutes there
            # Between the parts of a long prompt vLLM rewinds its random numbers, which a generator on a CPU cannot do.
            **({"enable_chunked_prefill": False} if is_cpu else {}),
            "seed": 0,  # every request has its own
            "disable_log_stats": True,
        }
        if not isinstance(model, str):
            base = getattr(model, "get_base_model", lambda: model)()
            config = copy.deepcopy(base.config)
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # its weights come dequantised
            config.architectures = [type(base).__name__]  # without it vLLM may take the model for an embedder
            config.save_pretrained(folder)
            settings |= {"model": folder, "load_format": "dummy", "dtype": str(base.dtype).removeprefix("torch.")}
        return LLMEngine.from_engine_args(EngineArgs(**{**settings, **options}))


def keep_weights_loadable() -> None:
    """Make vLLM on a CPU keep its weights where new ones can be loaded.

    Call it in the process that loads the model, before the model is loaded.

    With oneDNN or the SGL kernels, vLLM's linear layers on a CPU repack their weights once, after the first load, and
    empty or forget the parameter. Loading new weights then raises, or silently has no effect: log-probabilities
    were off by 0.8 after a sync. Without these kernels the layers compute with the parameter itself.
    """
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False
    _keep_experts_loadable()


def _keep_experts_loadable() -> None:
    """Make vLLM's fused experts on a CPU pack their weights in each call, not once after the first load.

    They have no kernel for weights that are not packed, so this costs a copy of a layer's experts in every pass. A
    vLLM without these experts (before 0.31) stays as it is: the check after a sync stops the run there.
    """
    try:  # by name: older releases in the declared range do without it
        cpu_moe = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    except ImportError:
        return
    experts = cpu_moe.CPUUnquantizedExperts
    if hasattr(experts, "packs_in_each_call"):
        return
    compute = experts.apply

    def keep(self: Any, layer: torch.nn.Module) -> None:
        self._use_zentorch = cpu_moe.is_zentorch_moe_supported(layer)

    def pack_and_compute(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        *rest: object,
        **more: object,
    ) -> None:
        if not self._use_zentorch:
            copies = torch.nn.Module()
            copies.w13_weight = torch.nn.Parameter(w1, requires_grad=False)
            copies.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
            self._pad_moe_intermediate(copies)  # to the width that the kernel wants
            assert copies.w2_weight.shape == w2.shape or self.w1_bias is None, (
                "experts with a bias need a width of 32, 64, ..."
            )
            w1 = cpu_moe.cpu_prepack_moe_weight(copies.w13_weight.data, self.isa)
            w2 = cpu_moe.cpu_prepack_moe_weight(copies.w2_weight.data, self.isa)
        compute(self, output, hidden_states, w1, w2, *rest, **more)

    experts.packs_in_each_call = True
    experts.process_weights_after_loading, experts.apply = keep, pack_and_compute


def _draw_from_seeds_alone() -> None:
    """Make vLLM's sampler on a CPU draw only what it uses, as its others do: all our requests have seeds.

    For each step it draws from torch's shared generator first, and then once more from those of the seeds. The update
    that runs meanwhile would get other numbers, by how many tokens were sampled before.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native


@contextmanager
def _shared_draws_kept() -> Iterator[None]:
    """The shared generators of Python, NumPy and torch as they were: vLLM seeds all of them, with one seed."""
    before = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _keep_process_group() -> None:
    """Make an engine that shuts down, by `close` or the garbage collector, destroy only its own groups.

    vLLM takes torch's default group down with it. Here that is the trainer's.
    """
    import vllm.v1.engine.core
    from vllm.distributed.parallel_state import destroy_model_parallel

    vllm.v1.engine.core.cleanup_dist_env_and_memory = destroy_model_parallel


@contextmanager
def _single_process_group() -> Iterator[None]:
    """The environment variables that vLLM's external launcher reads; afterwards everything is as it was.

    Left in place they would make accelerate believe in a distributed launch, and vLLM's own additions (`LD_PRELOAD`)
    would leak into every child process. vLLM's `VLLM_*` variables stay: it reads them again later.
    """
    before = dict(os.environ)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(launch | before)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before and not name.startswith("VLLM_")]:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})


def shut_down(engine: LLMEngine, *, owns_process_group: bool) -> None:
    """Free the engine, to which there must be no other reference, and vLLM's process groups.

    `owns_process_group` says that torch's default process group is vLLM's own and not the trainer's.
    """
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    engine.engine_core.shutdown()
    destroy_model_parallel()
    if owns_process_group:
        destroy_distributed_environment()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
