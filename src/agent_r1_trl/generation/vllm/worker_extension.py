"""Receive the trainer's weights inside the workers of a vLLM server.

    vllm serve MODEL --worker-extension-cls agent_r1_trl.generation.vllm.worker_extension.PolicyWorker ...

Only vLLM imports this module, in each worker's process and before the model is loaded; that is the one moment when the
kernels that repack weights can be kept out, so the import does it.
"""

from __future__ import annotations

import sys
from typing import Any

from agent_r1_trl.generation.vllm.engine import keep_weights_loadable
from agent_r1_trl.generation.vllm.generator import load_weights
from agent_r1_trl.generation.vllm.gloo_transfer import open_group, open_store, receive_weights


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
        """Whether weights can be received: one answer per worker."""
        return {"rank": self.rank}

    def agent_r1_connect(self, host: str, port: int, name: str, size: int, timeout_s: float) -> dict[str, Any]:
        """Join the trainer's group `name` of `size` members at `host`:`port`."""
        try:
            self._agent_r1_store = open_store(host, port, is_server=False, timeout_s=timeout_s)
            self._agent_r1_group = open_group(
                self._agent_r1_store, name, rank=self.rank + 1, size=size, timeout_s=timeout_s
            )
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    def agent_r1_receive(self, is_complete: bool) -> dict[str, Any]:
        """Load what the trainer sends."""
        from vllm.config import set_current_vllm_config

        weights = receive_weights(self._agent_r1_group)
        try:
            with set_current_vllm_config(self.vllm_config):
                load_weights(self.model_runner.model, weights, is_complete=is_complete)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            for _ in weights:  # what the model did not take must still be received
                pass
        return {}
