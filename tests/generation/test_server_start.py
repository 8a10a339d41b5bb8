"""A trainer that finds no vLLM server at the address it was given, or an unfit one, says what is there instead."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from torch import nn

from agent_r1_trl.generation import GenerationError, VLLMServerGenerator
from tests.servers import free_port, send_json


class Stub(HTTPServer):
    """Answers everything with the next of `answers` (status, body), the last one again and again."""

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), _Answering)
        self.answers = list(answers)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()


class _Answering(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self):
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        send_json(self, status, json.dumps(body).encode())

    def log_message(self, *args):
        pass


READY = (200, {"data": [{"id": "policy"}]})


def start(*urls, **options):
    return VLLMServerGenerator(urls, stop_token_ids=[1], **({"startup_timeout_s": 20} | options))


def test_the_server_that_does_not_answer_is_named_with_what_went_wrong():
    nobody = f"http://127.0.0.1:{free_port()}"
    with Stub(READY) as there, pytest.raises(GenerationError, match="vllm_server_timeout") as caught:
        start(there.url, nobody, startup_timeout_s=4)
    reason = str(caught.value).split("(", 1)[1].split(";")[0]
    assert nobody in reason
    assert "ConnectorError" in reason
    assert there.url not in reason


def test_a_server_that_is_still_starting_is_waited_for(caplog):
    with Stub((503, "loading"), (503, "loading"), READY) as server:
        start(server.url).close()
    waiting = [record.getMessage() for record in caplog.records if "Waiting up to 20 s" in record.getMessage()]
    assert len(waiting) == 1, "reported once"
    assert server.url in waiting[0]


@pytest.mark.parametrize("answer", [(404, {"detail": "Not Found"}), (200, {"data": []}), (200, ["hello"])], ids=str)
def test_another_kind_of_server_is_told_at_once(answer):
    before = time.monotonic()
    with Stub(answer) as server, pytest.raises(GenerationError, match=r"servers\.urls") as caught:
        start(server.url)
    assert time.monotonic() - before < 10
    assert server.url in str(caught.value)


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("KeyError: no value for model.layers.0.down_proj.base_layer.weight", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("ValueError: model.embed_tokens.weight (864, 128): AssertionError", "start it with the trainer's model"),
    ],
)
def test_a_server_that_cannot_take_the_weights_says_how_to_start_it(problem, fix):
    with Stub(READY, (200, {"results": [{"error": problem}]})) as server:
        generator = start(server.url)
        with pytest.raises(GenerationError) as caught:
            generator.sync(nn.Linear(2, 2))
        generator.close()
    assert problem in str(caught.value)
    assert fix in str(caught.value)


def test_a_server_without_the_worker_extension_says_how_to_start_it():
    with Stub(READY, (404, {"detail": "Not Found"})) as server:
        generator = start(server.url)
        with pytest.raises(GenerationError, match=r"VLLM_SERVER_DEV_MODE=1.*--worker-extension-cls"):
            generator.sync(nn.Linear(2, 2))
        generator.close()
