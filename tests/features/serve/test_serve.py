"""`agent-r1-trl serve` until its end; and what the documentation says of vLLM's own server, with a real one."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.calls import GRAMMARS
from agent_r1_trl.cli import main
from agent_r1_trl.evaluation import evaluate
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError
from agent_r1_trl.recording import read_trajectories
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest
from agent_r1_trl.rollout.hosted import HostedRunner
from agent_r1_trl.testing import AddEnv, add, call, make_policy, make_tokenizer
from agent_r1_trl.tools import Tool, as_tool, calculator
from agent_r1_trl.trajectory import StopReason
from tests.cli.conftest import TASK
from tests.servers import vllm_server

PAGE = Path(__file__).parents[3] / "docs" / "chat-and-serving.md"
TOOL = as_tool(add).schema
BY_HAND = Tool(
    lambda a: a,
    schema={
        "function": {
            "return": {"type": "string"}, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
            "strict": True, "name": "same",
        },
        "type": "function",
    },
)  # fmt: skip
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


def test_the_page_names_a_tool_parser_of_vllm_for_every_grammar_but_one():
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.count("|") == 3 and "`" in line]
    table = rows[[row[0].strip() for row in rows].index("`nemotron_nano`") - 5 :][:6]
    assert set(re.findall(r"`(\w+)`", "".join(row[0] for row in table))) == set(GRAMMARS)
    known = pytest.importorskip("vllm.tool_parsers").ToolParserManager.list_registered()
    assert set(re.findall(r"`(\w+)`", "".join(row[1] for row in table))) <= set(known)


@pytest.mark.parametrize("schema", [TOOL, as_tool(calculator).schema, as_tool(BY_HAND).schema], ids=str)
def test_a_request_to_vllm_keeps_the_schemas_of_training(schema):
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    read = protocol.ChatCompletionToolsParam.model_validate(schema).model_dump()
    assert json.dumps(read) == json.dumps(schema)


def test_mistakes_are_named_with_a_fix(refusal, model_folder):
    assert "MODEL" in refusal("serve")
    assert "port=99999" in refusal("serve", model_folder, "--port", "99999")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        message = refusal("serve", model_folder, "--port", taken.getsockname()[1], code=3)
        assert "cannot listen" in message and "Pass another --port" in message


@contextlib.contextmanager
def serving(*arguments, log):
    """The URL that the command prints; it ends with SIGTERM, with exit code 0."""
    command = [sys.executable, "-m", "agent_r1_trl.cli", "serve", *map(str, arguments)]
    with open(log, "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ)
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("print("):
                break
        else:
            raise AssertionError(Path(log).read_text()[-4000:])
        assert any(line.startswith("curl -s http://127.0.0.1:") for line in printed)
        (url,) = re.findall(r": (http://127.0.0.1:\d+/v1)\n", "".join(printed))  # other packages print as well
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_agent_is_served_until_it_is_told_to_end(recipe, model_folder, tmp_path):
    recipe()
    options = ("--port", 0, "--tools", "task.py:add", "--max_tokens_per_turn", 4)
    with serving(model_folder, *options, log=tmp_path / "log") as url:
        body = {"model": model_folder.name, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"][0]["message"]["agent"]["num_turns"] >= 1


@pytest.fixture(scope="module")
def calling_adapter(tmp_path_factory):
    """An adapter on a tiny model that answers one question with one tool call."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("calling")
    tokenizer = make_tokenizer("qwen2_5")
    chat = ChatFormat(tokenizer)
    model = make_policy(tokenizer, hidden_size=64)
    prompt, reply = chat.encode_prompt(QUESTION, [TOOL]), chat.encode_reply(call())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        ids = torch.tensor([prompt + reply])
        labels = torch.tensor([[-100] * len(prompt) + reply])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model.name_or_path = str(folder / "base")
    adapted = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


def tokenized(url, **body):
    """The ids of the prompt that the server makes of a request."""
    data = json.dumps({"model": "caller", "add_generation_prompt": True, **body}).encode()
    request = urllib.request.Request(f"{url.removesuffix('/v1')}/tokenize", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


def check_chat(monkeypatch, folder, *arguments):
    """A scripted chat, in which the model calls its tool and reads what comes back."""
    monkeypatch.chdir(folder)
    (folder / "task.py").write_text(TASK)
    said = folder / f"chat{len(arguments)}.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION[0]['content']}\n/save {said}\n"))
    options = ["--tools", "task.py:add", "--max_turns", "2", "--max_tokens_per_turn", "64"]
    assert main(["chat", *map(str, arguments), *options]) == 0
    (trajectory,) = read_trajectories(said)
    assert trajectory.prompt_ids == ChatFormat(make_tokenizer("qwen2_5")).encode_prompt(QUESTION, [TOOL])
    assert [result.content for result in trajectory.tool_results][:1] == ["5"]


@pytest.mark.vllm
@pytest.mark.release
def test_a_chat_samples_with_vllm_in_its_own_process(calling_adapter, tmp_path, monkeypatch):
    check_chat(monkeypatch, tmp_path, calling_adapter.parent / "base", "--use_vllm")


def check_evaluation(url):
    """The served model is evaluated as a hosted one: its call is run here, and the server has counted the tokens."""
    rows = [{"id": "q", "prompt": QUESTION}]
    limits = RolloutLimits(max_turns=2, max_completion_length=200, max_tokens_per_turn=64)
    result = evaluate(Endpoint(url, "caller"), AddEnv, None, rows, limits=limits)
    (trajectory,) = result.trajectories
    assert [(item.call.arguments, item.content) for item in trajectory.tool_results][:1] == [({"a": 2, "b": 3}, "5")]
    assert len(trajectory.turns) == 2 and trajectory.turns[0].observations[0]["content"] == "5"
    read = len(tokenized(url, messages=QUESTION, tools=[TOOL]))
    assert result.metrics["input_tokens"] > 2 * read and result.metrics["sampled_tokens"] > 20
    long = [{"id": "long", "prompt": "word " * 2000}]
    runner = HostedRunner(AddEnv, Endpoint(url, "caller"), limits)
    (cut,) = runner.run([RolloutRequest(example=long[0])])
    runner.close()
    assert cut.stop_reason is StopReason.PROMPT_TOO_LONG and "1024" in cut.error
    with pytest.raises(EndpointUnusableError, match="--model"):
        evaluate(Endpoint(url, "nobody"), AddEnv, None, rows)


@contextlib.contextmanager
def merged_and_served(model, folder, name, length):
    """The URL of vLLM's server for a model, as the page says: `merge`, then vLLM with the tool parser."""
    plain = folder / "plain"
    assert main(["merge", str(model), "--output_dir", str(plain)]) == 0
    options = ["--served-model-name", name, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with vllm_server(plain, folder, *options, "--max-model-len", str(length)) as url:
        yield f"{url}/v1"


@pytest.mark.vllm
@pytest.mark.release
def test_an_adapter_is_merged_and_served_by_vllm_and_calls_a_tool_through_the_client_of_openai(
    calling_adapter, tmp_path
):
    openai = pytest.importorskip("openai")
    with merged_and_served(calling_adapter, tmp_path, "caller", 1024) as url:
        client = openai.OpenAI(base_url=url, api_key="none")
        answer = client.chat.completions.create(
            model="caller", messages=QUESTION, tools=[TOOL], temperature=0, max_tokens=64
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls", (choice.message.content, answer.usage.prompt_tokens)
        (made,) = choice.message.tool_calls
        assert made.function.name == "add" and json.loads(made.function.arguments) == {"a": 2, "b": 3}
        expected = ChatFormat(make_tokenizer("qwen2_5")).encode_prompt(QUESTION, [TOOL])
        assert tokenized(url, messages=QUESTION, tools=[TOOL]) == expected
        check_evaluation(url)
