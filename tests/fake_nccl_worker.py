"""The worker extension of a vLLM server on CPUs whose weights come through `fake_nccl.py`. Only vLLM imports it."""

from agent_r1_trl.generation.vllm import worker_extension
from tests import fake_nccl

fake_nccl.install(setattr, worker_extension)


class FakeNCCLWorker(worker_extension.PolicyWorker):
    """Also tells what came that way."""

    def agent_r1_broadcasts(self):
        """How many bytes, in all."""
        return {"rank": self.rank, "bytes": sum(size for size, _ in fake_nccl.FakeNCCLLibrary.broadcasts)}
