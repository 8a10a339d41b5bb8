"""A real vLLM server for tests, on the CPU, and a way to it that can break."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from agent_r1_trl.testing import make_tokenizer

ROOT = Path(__file__).parents[1]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def vllm_server(model, folder, *options, environment=None):
    """The URL of a server that is ready; its output is in `folder`/server.log."""
    port = free_port()
    server = start_vllm_server(model, folder, port, *options, environment=environment)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}", folder / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        end_vllm_server(server)


@contextlib.contextmanager
def serve_policy(folder, seed, *options, environment=None):
    """The URL of a server of `make_policy`'s model, which is written to `folder`/model."""
    from agent_r1_trl.testing import make_policy

    tokenizer = make_tokenizer("qwen3")
    make_policy(tokenizer, seed=seed, hidden_size=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with vllm_server(folder / "model", folder, *options, environment=environment) as url:
        yield url


def on(url):
    """Options of a trainer whose sampler is this server."""
    return {"vllm_mode": "server", "servers.urls": [url]}


def start_vllm_server(model, folder, port, *options, environment=None):
    """The process of a server, which leads a session of its own and is not ready yet."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--no-enable-chunked-prefill",
        "--worker-extension-cls", "agent_r1_trl.generation.vllm.worker_extension.PolicyWorker", *options,
    ]  # fmt: skip
    settings = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    with open(folder / "server.log", "w") as log:
        return subprocess.Popen(
            command, env={**os.environ, **settings, **(environment or {})}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def end_vllm_server(server):
    """End a server and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


class RealServer:
    """A server at one port, which tests freeze, kill and start again."""

    def __init__(self, model, folder):
        self._model = model
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self):
        """Start it, again after `signal(SIGKILL)`; it answers only some time later."""
        self._process = start_vllm_server(self._model, self._folder, self._port)

    def wait(self):
        wait_until_ready(self._process, self.url, self._folder / "server.log")

    def signal(self, number):
        """Send a signal to all its processes."""
        os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def end(self):
        end_vllm_server(self._process)


def wait_until_ready(server, url, log, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health"):
            return
        time.sleep(0.2)
    raise AssertionError(f"The server did not start:\n{log.read_text()[-4000:]}")


class Line(ThreadingHTTPServer):
    """Passes requests on to a server; after `num_answers` completions it answers nothing, like a server that died."""

    daemon_threads = True

    def __init__(self, server_url, num_answers=None):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.server_url = server_url
        self.num_answers = num_answers
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answered = []
        """The prompts that were answered, token ids each."""
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def may_answer(self, body):
        """Whether the server is still alive to answer this request; a completion counts."""
        with self.lock:
            if self.num_answers is not None and len(self.answered) >= self.num_answers:
                return False
            if body is not None:
                self.answered.append(json.loads(body)["prompt"])
            return True


def send_json(handler, status, content):
    """Answer a request with these bytes."""
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length) if length else None
        request = urllib.request.Request(
            self.server.server_url + self.path, body, {"Content-Type": "application/json"}, method=self.command
        )
        with urllib.request.urlopen(request) as answer:
            content = answer.read()
        self.close_connection = not self.server.may_answer(body)
        if self.close_connection:
            return
        send_json(self, 200, content)

    def log_message(self, *args):
        pass
