"""Receive the trainer's weights inside the workers of a vLLM server.

    vllm serve MODEL --worker-extension-cls agent_r1_trl.generation.vllm.worker_extension.PolicyWorker ...

Only vLLM imports this module, in each worker's process and before the model is loaded; that is the one moment when the
kernels that repack weights can be kept out, so the import does it.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

from agent_r1_trl.generation.vllm.engine import keep_weights_loadable
from agent_r1_trl.generation.vllm.generator import load_weights
from agent_r1_trl.generation.vllm.weight_transfer import receive_weights

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
    model_runner: Any
    vllm_config: Any

    def agent_r1_hello(self) -> dict[str, Any]:
        """Which process this is, and the name of the weights that it received last (None: none, or not all)."""
        return {"rank": self.rank, "process": PROCESS, "weights": getattr(self, "_agent_r1_weights", None)}

    def agent_r1_receive(
        self, host: str, port: int, token: str, timeout_s: float, name: str, is_complete: bool
    ) -> dict[str, Any]:
        """Load what the trainer at `host`:`port` sends; from then on these are the weights `name`."""
        from vllm.config import set_current_vllm_config

        self._agent_r1_weights = None  # if this breaks off, the model is neither the old one nor the new one
        try:
            weights = receive_weights(host, port, token, rank=self.rank, timeout_s=timeout_s)
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
