"""The worker extension of a vLLM server that can be made not to see the trainer's folders. Only vLLM imports it."""

import os
from pathlib import Path

from agent_r1_trl.generation.vllm.worker_extension import PolicyWorker

VARIABLE = "AGENT_R1_TEST_ELSEWHERE"
"""Names a file; while it exists, the server is as on another machine."""


class ElsewhereWorker(PolicyWorker):
    def agent_r1_hello(self, path=None):
        return super().agent_r1_hello(None if Path(os.environ[VARIABLE]).exists() else path)
