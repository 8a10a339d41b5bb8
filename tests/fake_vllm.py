"""A stand-in for a vLLM server with the routes that a trainer uses, which can die, freeze and come back as a new one.

Its model is one number, the sum of the weights it received (`BASE` before), and each token that it "samples" is that
number: an answer says which weights it came from.
"""

import asyncio
import contextlib
import hashlib
import json
import threading
import uuid
from pathlib import Path

from aiohttp import web
from safetensors.torch import load_file

from agent_r1_trl.generation.vllm.server_routes import PROTOCOL
from tests.servers import free_port

BASE = 7
"""What a server that was just started answers."""


class FakeServer:
    """One server; a context manager, and usable again after `kill`.

    Args:
        adapters: serve LoRA (then whole weights cannot be sent).
        host: address where it listens.
    """

    def __init__(self, *, adapters=False, host="127.0.0.1"):
        self.host = host
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.adapters = adapters
        self.answer_s = 0.0
        """Seconds before each completion."""
        self.token_s = 0.0
        """Seconds before each token of a stream."""
        self.num_streams = 0
        """Streams that are being written now."""
        self.error_after = None
        """After so many tokens a stream has an error in place of the next one."""
        self.break_transfer = False
        """Die in the middle of the next weight transfer."""
        self.may_receive = threading.Event()
        """Unset it to stop reading in the middle of a weight transfer."""
        self.may_receive.set()
        self.machine = None
        """Of its own; then it does not see the trainer's folder."""
        self.knows_every_name = False
        """Answer requests for unknown models with the base model."""
        self.context = None
        """How many tokens a request may take, prompt included; None for any number."""
        self.tells_context = True
        """Say so in the list of models, as vLLM does."""
        self.refusal = None
        """Answer completions with status 400 and this message."""
        self.is_busy = False
        """Answer completions with status 503."""
        self.cache_is_held = False
        self.keeps_cache = False  # whatever is asked of it
        """Whether a request uses the prefix cache, which then is emptied only together with it."""
        self.calls = []
        """Names of the routes that were called."""
        self.bodies = []
        """Of the completions that were asked for."""
        self.num_answers = self.num_refused = 0
        self._loop = asyncio.new_event_loop()
        self._runner = None

    def __enter__(self):
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.start()
        return self

    def __exit__(self, *error):
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    # ---------------------------------------------------------------- what tests do to it

    def start(self):
        """As a new process, with the weights it was started from."""
        self.process = uuid.uuid4().hex
        self.value = BASE
        self.weights = None
        self.loaded = {}
        self.sums = {}
        self.coming = None
        self.is_frozen = False
        self._run(self._listen())

    def kill(self):
        """Close every connection without an answer, and the port."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            self._run(self._end(runner))

    def restart(self):
        """`kill` and `start`, with nothing in between."""
        self.kill()
        self.start()

    # ---------------------------------------------------------------- the server

    async def _listen(self):
        app = web.Application(middlewares=[self._note])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/collective_rpc", self._rpc)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/v1/load_lora_adapter", self._load_adapter if self.adapters else self._no_route)
        app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.host, self.port, reuse_address=True).start()
        self._runner = runner

    async def _end(self, runner):
        for connection in list(runner.server.connections):
            with contextlib.suppress(AttributeError):
                connection.transport.abort()
        await runner.cleanup()

    @web.middleware
    async def _note(self, request, handler):
        self.calls.append(request.path)
        while self.is_frozen:
            await asyncio.sleep(0.02)
        return await handler(request)

    async def _health(self, request):
        return web.Response()

    async def _no_route(self, request):
        return web.json_response({"detail": "Not Found"}, status=404, dumps=lambda _: '{"detail":"Not Found"}')

    async def _models(self, request):
        model = {"id": "policy", "max_model_len": self.context if self.tells_context else None}
        return web.json_response({"data": [model, *({"id": name} for name in self.loaded)]})

    async def _complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        is_known = body["model"] in ("policy", *self.loaded)
        if not (is_known or self.knows_every_name):
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        num_input, num_output = len(body["prompt"]), body["max_tokens"]
        refusal = self.refusal
        if self.context is not None and num_input + num_output > self.context:
            refusal = (
                f"This model's maximum context length is {self.context} tokens. However, you requested {num_output} "
                f"output tokens and your prompt contains {num_input} input tokens."
            )
        if refusal is not None:
            self.num_refused += 1
            error = {"message": refusal, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        if self.is_busy:
            self.num_refused += 1
            return web.json_response({"error": {"message": "Too many requests."}}, status=503)
        name = body["model"] if is_known else "policy"
        value = self.loaded.get(name, self.value)
        await asyncio.sleep(self.answer_s)
        self.num_answers += 1
        if body.get("stream"):
            return await self._stream(request, name, num_output)
        logprobs = {"tokens": [f"token_id:{value}"] * num_output, "token_logprobs": [-1.0] * num_output}
        choice = {"finish_reason": "length", "logprobs": logprobs}
        if "prompt_logprobs" in body:
            score = {"logprob": -float(value)}
            choice["prompt_logprobs"] = [None, *({str(token): score} for token in body["prompt"][1:])]
        return web.json_response({"model": name, "choices": [choice]})

    async def _stream(self, request, name, num_output):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.num_streams += 1
        try:
            for number in range(1, num_output + 1):
                await asyncio.sleep(self.token_s)
                if self.error_after == number - 1:
                    await _send(response, {"error": {"message": "The engine is dead.", "code": 500}})
                    return response
                logprobs = {"tokens": [f"token_id:{self.loaded.get(name, self.value)}"], "token_logprobs": [-1.0]}
                choice = {"finish_reason": "length" if number == num_output else None, "logprobs": logprobs}
                await _send(response, {"model": name, "choices": [choice]})
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.num_streams -= 1
        return response

    async def _rpc(self, request):
        body = await request.json()
        method = getattr(self, body["method"].replace("agent_r1", "rpc"))
        return web.json_response({"results": [await asyncio.to_thread(method, *body["args"])]})

    def rpc_hello(self, path=None):
        return {
            "rank": 0,
            "process": self.process,
            "protocol": PROTOCOL,
            "weights": self.weights,
            "gpu": None,
            "sees": self.machine is None and path is not None and Path(path).exists(),
        }

    def rpc_begin(self, name, group):
        self.weights, self.coming = None, name
        return {"rank": 0}

    def rpc_load(self, name, entries, file):
        if self.coming != name:
            return {"rank": 0, "error": "RuntimeError: restarted"}
        self.sums |= {key: float(value.sum()) for key, value in load_file(file).items()}
        self.may_receive.wait(20)
        if self.break_transfer:
            self.break_transfer = False
            self.kill()
        return {"rank": 0}

    def rpc_end(self, name, is_complete):
        self.value = round(sum(self.sums.values()))
        self.weights = name
        self.coming = None
        return {"rank": 0}

    async def _reset(self, request):
        is_held = self.cache_is_held and "reset_running_requests" not in request.query
        return web.json_response({"success": not (is_held or self.keeps_cache)})

    async def _load_adapter(self, request):
        body = await request.json()
        tensors = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        content = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
        self.loaded[body["lora_name"]] = 1000 + int(hashlib.sha256(content).hexdigest()[:4], 16)
        return web.Response(text="Success")

    async def _unload_adapter(self, request):
        self.loaded.pop((await request.json())["lora_name"], None)
        return web.Response(text="Success")


async def _send(response, event):
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
