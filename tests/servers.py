"""A real vLLM server for tests, on the CPU."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def vllm_server(model, folder, *options, environment=None):
    """The URL of a server that is ready; its output is in `folder`/server.log."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--worker-extension-cls", "agent_r1_trl.generation.vllm_worker.PolicyWorker", *options,
    ]  # fmt: skip
    settings = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **settings, **(environment or {})}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_until_ready(server, f"http://127.0.0.1:{port}", folder / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def wait_until_ready(server, url, log, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health"):
            return
        time.sleep(0.2)
    raise AssertionError(f"The server did not start:\n{log.read_text()[-4000:]}")
