"""Receive the trainer's weights inside the workers of a vLLM server.

    vllm serve MODEL --worker-extension-cls agent_r1_trl.generation.vllm.worker_extension.PolicyWorker ...

Only vLLM imports this module, in each worker's process and before the model is loaded; that is the one moment when the
kernels that repack weights can be kept out, so the import does it.
"""

from __future__ import annotations

import functools
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

import torch

from agent_r1_trl.generation.vllm.engine import keep_weights_loadable
from agent_r1_trl.generation.vllm.generator import check_complete, load_weights
from agent_r1_trl.generation.vllm.server_routes import PROTOCOL
from agent_r1_trl.generation.vllm.weight_transfer import NCCLGroup, describe_gpu

PROCESS = uuid.uuid4().hex
"""Names this process; a server that was restarted has others."""


def _prepare() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_weights_loadable()


if "vllm" in sys.modules:
    _prepare()


def answers(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Answer with the rank and what the method returns; or with the error, whose text would not reach the trainer."""

    @functools.wraps(method)
    def answer(self: PolicyWorker, *arguments: object) -> dict[str, Any]:
        try:
            return {"rank": self.rank} | (method(self, *arguments) or {})
        except Exception as error:
            return {"rank": self.rank, "error": f"{type(error).__name__}: {error}"}

    return answer


class PolicyWorker:
    """Methods that vLLM adds to its worker; the server's `/collective_rpc` calls them on every one."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any

    _agent_r1_weights: str | None = None
    """Name of the weights that the model has; None for those it was started with, and while others come."""
    _agent_r1_coming: str | None = None
    _agent_r1_loaded: set[str] | None = None
    _agent_r1_group: NCCLGroup | None = None

    @answers
    def agent_r1_hello(self, path: str | None = None) -> dict[str, Any]:
        """Which process this is, the name of its weights, its GPU, and whether it can read the trainer's `path`."""
        if not hasattr(self, "_agent_r1_gpu"):
            self._agent_r1_gpu = describe_gpu(self.device)
        return {
            "process": PROCESS,
            "protocol": PROTOCOL,
            "weights": self._agent_r1_weights,
            "gpu": self._agent_r1_gpu,
            "sees": path is not None and os.access(path, os.R_OK),
        }

    @answers
    def agent_r1_begin(self, name: str, group: dict[str, Any] | None) -> None:
        """Expect the weights `name`; if they break off, the model has neither the old ones nor these.

        `group` is the number under which an NCCL group meets, its size and the limit for a call; None: files come.
        """
        self._agent_r1_close()
        self._agent_r1_weights = None
        self._agent_r1_coming = name
        self._agent_r1_loaded = set()
        if group is not None:
            joined = NCCLGroup(self.rank + 1, group["size"], self.device, timeout_s=group["timeout_s"])
            joined.meet(bytes.fromhex(group["number"]))
            self._agent_r1_group = joined

    @answers
    def agent_r1_load(self, name: str, entries: list[tuple[str, str, list[int]]], file: str | None) -> None:
        """Load some of the weights `name`: those in a file of safetensors, or what the group's trainer sends (None).

        Entries are name, dtype (`bfloat16`) and shape of each tensor.
        """
        from vllm.config import set_current_vllm_config

        self._agent_r1_check(name)
        if file is None:
            assert self._agent_r1_group is not None
            weights = {
                entry: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                for entry, dtype, shape in entries
            }
            self._agent_r1_group.broadcast([*weights.values()])
        else:
            from safetensors.torch import load_file

            weights = load_file(file)
        with set_current_vllm_config(self.vllm_config):
            loaded = load_weights(self.model_runner.model, ((entry, weights[entry]) for entry, _, _ in entries))
        known = self._agent_r1_loaded
        self._agent_r1_loaded = None if known is None or loaded is None else known | loaded

    @answers
    def agent_r1_end(self, name: str, is_complete: bool) -> None:
        """Take the weights `name` for those of the model; `is_complete`: if each of its parameters has come."""
        self._agent_r1_check(name)
        self._agent_r1_close()
        if is_complete:
            check_complete(self.model_runner.model, self._agent_r1_loaded)
        self._agent_r1_weights, self._agent_r1_coming = name, None

    def _agent_r1_check(self, name: str) -> None:
        if self._agent_r1_coming != name:
            raise RuntimeError("the server was restarted during the transfer, or another trainer sends to it")

    def _agent_r1_close(self) -> None:
        if self._agent_r1_group is not None:
            self._agent_r1_group.close()
        self._agent_r1_group = None
