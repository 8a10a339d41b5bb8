"""A stand-in for a vLLM server on another machine: `python -m tests.distributed.far_server ADDRESS FOLDER STEPS`.

`FOLDER/url` says where it listens; each weight transfer adds a line to `FOLDER/sums`: the sum of all weights. It
serves that many steps; the answers of the next one never come, and `FOLDER/held` lists who waits for them.
"""

import asyncio
import sys
import threading
from pathlib import Path

from tests.fake_vllm import FakeServer


class FarServer(FakeServer):
    """Tells what it received."""

    def __init__(self, address, folder, num_steps):
        super().__init__(host=address)
        self._folder, self._num_left = folder, num_steps

    def rpc_end(self, *args):
        with open(self._folder / "sums", "a") as file:
            file.write(f"{sum(self.sums.values())!r}\n")
        self._num_left -= 1
        return super().rpc_end(*args)

    async def _complete(self, request):
        if self._num_left < 0 and "prompt_logprobs" not in await request.json():
            with open(self._folder / "held", "a") as file:
                file.write(f"{request.remote}\n")
            await asyncio.sleep(1e6)
        return await super()._complete(request)


if __name__ == "__main__":
    address = sys.argv[1]
    folder = Path(sys.argv[2])
    num_steps = int(sys.argv[3])
    with FarServer(address, folder, num_steps) as server:
        (folder / "url.tmp").write_text(f"http://{address}:{server.port}", encoding="utf-8")
        (folder / "url.tmp").rename(folder / "url")
        threading.Event().wait()
