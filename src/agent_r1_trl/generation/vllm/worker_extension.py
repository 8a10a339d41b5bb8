"""Receive the trainer's weights, or an adapter's files, inside the workers of a vLLM server.

    vllm serve MODEL --worker-extension-cls agent_r1_trl.generation.vllm.worker_extension.PolicyWorker ...

Only vLLM imports this module, in each worker's process and before the model is loaded; that is the one moment when the
kernels that repack weights can be kept out, so the import does it.
"""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

import torch

from agent_r1_trl.generation.vllm.engine import keep_weights_loadable
from agent_r1_trl.generation.vllm.generator import load_weights
from agent_r1_trl.generation.vllm.lora_files import forget_adapters, keep_adapter
from agent_r1_trl.generation.vllm.nccl_group import describe_gpu
from agent_r1_trl.generation.vllm.weight_transfer import PROTOCOL, receive_weights

PROCESS = uuid.uuid4().hex
"""Names this process; a server that was restarted has others."""


def _prepare() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_weights_loadable()


if "vllm" in sys.modules:
    _prepare()


class PolicyWorker:
    """Methods that vLLM adds to its worker; the server's `/collective_rpc` calls them on every one.

    Each answers with a dict, `error` in it if something failed: an exception would reach the trainer without its text.
    """

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def agent_r1_hello(self) -> dict[str, Any]:
        """Which process this is, the name of the weights that it received last (None: none, or not all), its GPU."""
        return {
            "rank": self.rank,
            "process": PROCESS,
            "protocol": PROTOCOL,
            "weights": getattr(self, "_agent_r1_weights", None),
            "gpu": self._agent_r1_describe(),
        }

    def _agent_r1_describe(self) -> dict[str, str] | None:
        if not hasattr(self, "_agent_r1_gpu"):
            self._agent_r1_gpu = describe_gpu(self.device)
        return self._agent_r1_gpu

    def agent_r1_receive(
        self, host: str, port: int, token: str, timeout_s: float, name: str, is_complete: bool
    ) -> dict[str, Any]:
        """Load what the trainer at `host`:`port` sends; from then on these are the weights `name`."""
        from vllm.config import set_current_vllm_config

        self._agent_r1_weights = None  # if this breaks off, the model is neither the old one nor the new one
        try:
            device = None if self._agent_r1_describe() is None else self.device
            weights = receive_weights(host, port, token, rank=self.rank, timeout_s=timeout_s, device=device)
            try:
                with set_current_vllm_config(self.vllm_config):
                    load_weights(self.model_runner.model, weights, is_complete=is_complete)
            finally:
                for _ in weights:  # what the model did not take must still be received
                    pass
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self._agent_r1_weights = name
        return self.agent_r1_hello()

    # ---------------------------------------------------------------- adapters

    def agent_r1_sees(self, file: str) -> dict[str, Any]:
        """Whether a file of the trainer can be read here."""
        return {"rank": self.rank, "sees": os.access(file, os.R_OK)}

    def agent_r1_adapter(
        self, host: str, port: int, token: str, timeout_s: float, name: str, old: str | None
    ) -> dict[str, Any]:
        """Keep the files of the adapter `name`, which the trainer at `host`:`port` sends; and where they are."""
        try:
            files = receive_weights(host, port, token, rank=self.rank, timeout_s=timeout_s)
            try:
                path = keep_adapter(name, files, old=old)
            finally:
                for _ in files:
                    pass
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"rank": self.rank, "path": str(path)}

    def agent_r1_forget(self, name: str, but: str | None) -> dict[str, Any]:
        """Remove the adapters of the run of `name`, except for one."""
        forget_adapters(name, but=[but])
        return {"rank": self.rank}
