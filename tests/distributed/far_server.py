"""A stand-in for a vLLM server on another machine: `python -m tests.distributed.far_server ADDRESS FOLDER`.

`FOLDER/url` says where it listens; each weight transfer adds a line to `FOLDER/sums`: the sum of all weights.
"""

import sys
import threading
from pathlib import Path

from tests.fake_vllm import FakeServer


class FarServer(FakeServer):
    """Tells what it received."""

    def __init__(self, address, folder):
        super().__init__(host=address)
        self._folder = folder

    def rpc_end(self, *args):
        with open(self._folder / "sums", "a") as file:
            file.write(f"{sum(self.sums.values())!r}\n")
        return super().rpc_end(*args)


if __name__ == "__main__":
    address, folder = sys.argv[1], Path(sys.argv[2])
    with FarServer(address, folder) as server:
        (folder / "url.tmp").write_text(f"http://{address}:{server.port}", encoding="utf-8")
        (folder / "url.tmp").rename(folder / "url")
        threading.Event().wait()
