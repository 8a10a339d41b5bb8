"""`agent-r1-trl serve`: which parser and template vLLM gets; a real server, a real client, and their end."""

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
from agent_r1_trl.cli import main
from agent_r1_trl.evaluation import evaluate
from agent_r1_trl.features.serve.vllm_process import choose_parser, server_command
from agent_r1_trl.generation.endpoint import Endpoint, EndpointUnusableError
from agent_r1_trl.recording import read_trajectories
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest
from agent_r1_trl.rollout.hosted import HostedRunner
from agent_r1_trl.tools import Tool, as_tool, calculator
from agent_r1_trl.trajectory import StopReason
from tests.cli.conftest import TASK
from tests.families import FAMILIES
from tests.servers import free_port
from tests.tokenizers import make_tokenizer
from tests.toys import AddEnv, add, call
from tests.trainers.helpers import make_policy

PARSERS = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_5": "qwen3_coder", "hermes_3": "hermes", "llama3_1": "llama3_json",
    "llama3_2": "llama3_json", "mistral_nemo": "mistral", "deepseek_v3_1": "deepseek_v31", "kimi_k2": "kimi_k2",
    "glm_4_5": "glm47", "minimax_m2": "minimax_m2", "seed_oss": "seed_oss", "nemotron_nano_2": None, "lfm2": "lfm2",
    "command_r7b": "cohere_command3", "gemma4": "gemma4", "gpt_oss": "openai",
}  # fmt: skip
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


@pytest.mark.parametrize("family", PARSERS)
def test_every_family_has_its_tool_parser_or_a_reason(family):
    parser = choose_parser(ChatFormat(FAMILIES[family]()))
    assert parser.name == PARSERS[family]
    assert (parser.name is None) == bool(parser.reason)


def test_the_parsers_are_those_of_vllm():
    tool_parsers = pytest.importorskip("vllm.tool_parsers")
    known = tool_parsers.ToolParserManager.list_registered()
    assert {name for name in PARSERS.values() if name is not None} <= set(known)


@pytest.mark.parametrize("schema", [TOOL, as_tool(calculator).schema, as_tool(BY_HAND).schema], ids=str)
def test_a_request_to_vllm_keeps_the_schemas_of_training(schema):
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    read = protocol.ChatCompletionToolsParam.model_validate(schema).model_dump()
    assert json.dumps(read) == json.dumps(schema)


def test_the_server_gets_the_template_of_training(tmp_path):
    options = {"name": "a", "host": "127.0.0.1", "port": 1, "tool_parser": "hermes", "is_cpu": False}
    file = tmp_path / "template.jinja"
    chat = ChatFormat(FAMILIES["qwen2_5"]())
    assert "--chat-template" not in server_command("m", chat, template_file=file, **options)
    chat = ChatFormat(FAMILIES["qwen3"](), thinking="off")  # the published template is replaced
    command = server_command("m", chat, template_file=file, **options, options=["--seed", "3"])
    assert command[command.index("--chat-template") + 1] == str(file)
    assert file.read_text() == chat.chat_template != chat.tokenizer.chat_template
    assert json.loads(command[command.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": False}
    assert command[-2:] == ["--seed", "3"] and "--enable-auto-tool-choice" in command


def test_mistakes_are_named_with_a_cure(refusal, model_folder, monkeypatch):
    monkeypatch.setattr("agent_r1_trl.features.serve.vllm_process.has_vllm", lambda: True)  # or that is the mistake
    assert "MODEL" in refusal("serve")
    assert "MODEL" in refusal("serve", "--agent")
    assert "port=99999" in refusal("serve", model_folder, "--port", "99999")
    assert "start_timeout" in refusal("serve", model_folder, "--start_timeout", "0")
    assert "no such option" in refusal("serve", model_folder, "--max_turns_", "1")
    assert "Remove it, or pass --agent as well." in refusal("serve", model_folder, "--max_turns", "1")
    assert "another command has. Remove it." in refusal("serve", model_folder, "--learning_rate", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "cannot listen" in refusal("serve", model_folder, "--port", port, code=3)
        assert "cannot listen" in refusal("serve", model_folder, "--agent", "--port", port, code=3)


@contextlib.contextmanager
def serving(*arguments, log):
    """The URL that the command prints and its process; it ends with SIGTERM, with exit code 0."""
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
        yield url, "".join(printed), process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_agent_is_served_until_it_is_told_to_end(recipe, model_folder, tmp_path):
    recipe()
    with serving(
        "--agent",
        model_folder,
        "--port",
        0,
        "--tools",
        "task.py:add",
        "--max_tokens_per_turn",
        4,
        log=tmp_path / "log",
    ) as (url, _, _):
        body = {"model": model_folder.name, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"][0]["message"]["agent"]["events"]


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


@pytest.mark.vllm
def test_an_adapter_is_served_by_vllm_and_calls_a_tool_through_the_client_of_openai(
    calling_adapter, tmp_path, monkeypatch
):
    openai = pytest.importorskip("openai")
    before = {path.name: path.read_bytes() for path in calling_adapter.iterdir()}
    with serving(
        calling_adapter, "--port", free_port(), "--served_name", "caller", "--vllm_options",
        "--max-model-len 1024 --max-num-seqs 4", log=tmp_path / "log",
    ) as (url, printed, process):  # fmt: skip
        assert 'model="caller"' in printed
        client = openai.OpenAI(base_url=url, api_key="none")
        answer = client.chat.completions.create(
            model="caller", messages=QUESTION, tools=[TOOL],
            temperature=0, max_tokens=64,
        )  # fmt: skip
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls", (choice.message.content, answer.usage.prompt_tokens)
        (made,) = choice.message.tool_calls
        assert made.function.name == "add" and json.loads(made.function.arguments) == {"a": 2, "b": 3}
        assert tokenized(url, messages=QUESTION, tools=[TOOL]) == ChatFormat(make_tokenizer("qwen2_5")).encode_prompt(
            QUESTION, [TOOL]
        )
        check_evaluation(url)
        check_chat(monkeypatch, tmp_path, calling_adapter.parent / "base", "--server", url.removesuffix("/v1"))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children and not [child for child in children if Path(f"/proc/{child}").exists()]
    assert {path.name: path.read_bytes() for path in calling_adapter.iterdir()} == before
