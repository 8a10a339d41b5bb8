"""`agent-r1-trl chat` with scripted input and a tiny untrained model."""

import io
import json
import shutil
import time
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agent_r1_trl.cli import main
from agent_r1_trl.features.serve import Conversation, ConversationError
from agent_r1_trl.recording import read_trajectories
from agent_r1_trl.safe_text import visible
from agent_r1_trl.trajectory import StopReason


@pytest.fixture
def chat(monkeypatch, capsys):
    """`chat(lines, *arguments)` is what a chat prints, after it has ended with `code`."""

    def run(lines, *arguments, code=0):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        assert main(["chat", *map(str, arguments)]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def answering_model(model_folder, tmp_path_factory):
    """The tiny model, whose turns end: at every other id."""
    folder = tmp_path_factory.mktemp("answering") / "model"
    shutil.copytree(model_folder, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    GenerationConfig(eos_token_id=list(range(0, size, 2))).save_pretrained(folder)
    return folder


def saved(path):
    return list(read_trajectories(path))


def test_a_scripted_chat_with_a_recipe(recipe, chat, answering_model, capsys):
    config = recipe(max_turns=20, max_completion_length=400, max_tokens_per_turn=64)
    lines = [
        "/mask",
        "Hello",
        "/save",
        "/save no/such/folder/a.jsonl",
        "/save a.json",
        "/save a.jsonl",
        "Once more",
        "/save a.jsonl",
        "/save my chat.jsonl",
        "/mask",
    ]
    rest = ["/reset", "/helpp", "/help", "/quit", "not read"]
    out = chat([*lines, *rest], answering_model, "--config", config, "--temperature", "1")
    assert out.index("(nothing has been said)") < out.index("> Hello")
    assert "not read" not in out and "did you mean" in out.lower() and out.count("cannot be written") == 3
    assert not Path("a.json").exists() and "view 'my chat.jsonl' --terminal" in out
    first, second = saved("a.jsonl")
    assert [message["content"] for message in second.messages if message["role"] == "user"] == ["Hello", "Once more"]
    assert second.completion_ids[: len(first.completion_ids)] == first.completion_ids
    assert "⟦" in out and "policy (mask 1)" in out
    assert "reward: none: nothing scored it   turns: 2" in out and "reward: +0.000" not in out
    tokenizer = AutoTokenizer.from_pretrained(answering_model)
    said = [tokenizer.decode(second.completion_ids[turn.start : turn.end - 1]) for turn in second.turns]
    assert all(visible(text) in out for text in said) and max(map(len, said)) > 3
    assert main(["view", "a.jsonl", "--terminal", "--color", "never"]) == 0
    assert "Once more" in capsys.readouterr().out


def test_the_limits_of_the_recipe_end_the_chat(recipe, chat):
    out = chat(["Hello", "Again", "/reset", "Hello"], "--config", recipe(max_turns=1))
    assert out.count("max_turns=1 is reached; your next message begins another)") == 3
    assert out.count("(a new conversation)") == 2  # before "Again", and by /reset


BEATING = """

class BeatingEnv(AddEnv):
    async def reset(self, example):
        self.beating = asyncio.create_task(self.beat())
        return super().reset(example)

    async def beat(self):  # as one that answers the pings of a server
        while True:
            with open("beats", "a") as file:
                file.write(".")
            await asyncio.sleep(0.01)

    def close(self):  # the loop outlives the chat, and would go on in the next test's directory
        self.beating.get_loop().call_soon_threadsafe(self.beating.cancel)
"""


def test_an_environment_lives_on_while_the_user_thinks(recipe, monkeypatch):
    class Thinking(io.StringIO):
        def readline(self):
            before, until = num_beats(), time.monotonic() + 3
            while before and num_beats() < before + 5 and time.monotonic() < until:
                time.sleep(0.01)
            grown.append(num_beats() - before)
            return super().readline()

    def num_beats():
        return len(Path("beats").read_text()) if Path("beats").exists() else 0

    grown, config = [], recipe(max_tokens_per_turn=4)
    Path("task.py").write_text("import asyncio\n" + Path("task.py").read_text() + BEATING)
    monkeypatch.setattr("sys.stdin", Thinking("Hello\n/quit\n"))
    assert main(["chat", "--config", config, "--env", "task.py:BeatingEnv"]) == 0
    assert grown[0] == 0 and grown[1] >= 5


FAILED, ENDED = StopReason.GENERATION_ERROR, StopReason.MAX_TURNS


@pytest.mark.parametrize(
    ("answers", "code"),
    [([FAILED, None], 0), ([None, FAILED], 3), ([FAILED, ENDED], 0), ([ENDED, FAILED], 3)],
)
def test_the_exit_code_says_whether_the_last_message_failed(recipe, chat, monkeypatch, answers, code):
    left = list(answers)

    async def say(conversation, text):
        if (reason := left.pop(0)) is not None:
            raise ConversationError("no answer", reason)

    monkeypatch.setattr(Conversation, "say", say)
    out = chat(["first", "second", "/help"], "--config", recipe(), code=code)
    assert not left and out.count("(not answered: no answer") == len(answers) - answers.count(None)


def test_a_model_alone_or_with_tools_of_a_module(recipe, chat, model_folder):
    recipe()
    options = ["--max_tokens_per_turn", "4", "--temperature", "1"]
    alone = chat(["Hello", "/save plain.jsonl"], model_folder, *options)
    with_tools = chat(["Hello", "/save tools.jsonl"], model_folder, *options, "--tools", "task.py:add")
    said = "The agent has no environment, so no tools. To give it the training's, pass --env my_env.py:MyEnv"
    assert said in alone and "no environment" not in with_tools
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    (plain,), (tools,) = saved("plain.jsonl"), saved("tools.jsonl")
    assert "Add two numbers" in tokenizer.decode(tools.prompt_ids)
    assert "Add two numbers" not in tokenizer.decode(plain.prompt_ids)


def test_a_run_without_its_environment_is_told_of_its_recipe(recipe, chat, answering_model, tmp_path):
    folder = shutil.copytree(answering_model, tmp_path / "a run")
    shutil.copy(recipe(), folder / "recipe.yaml")
    assert f"pass --config '{folder}/recipe.yaml'." in chat([], folder)
    assert "no environment" not in chat([], folder, "--config", folder / "recipe.yaml")


def test_an_adapter_is_put_on_its_base(recipe, chat, model_folder, tmp_path):
    recipe()
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder),
        LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    options = ["--env", "task.py:AddEnv", "--env_kwargs", "{bonus: 2}", "--max_tokens_per_turn", "8"]
    for name, folder in {"base": model_folder, "adapter": tmp_path / "adapter"}.items():
        chat(["Hello", f"/save {name}.jsonl"], folder, *options)
    assert saved("base.jsonl")[0].prompt_ids == saved("adapter.jsonl")[0].prompt_ids
    assert saved("base.jsonl")[0].completion_ids != saved("adapter.jsonl")[0].completion_ids


def test_mistakes_are_named_with_a_fix(recipe, refusal, model_folder):
    recipe()
    assert "MODEL" in refusal("chat")
    assert "Remove one" in refusal("chat", model_folder, "--env", "task.py:AddEnv", "--tools", "task.py:add")
    assert "no such directory" in refusal("chat", "./nowhere")
    assert "env_kwargs" in refusal("chat", model_folder, "--env_kwargs", "{a: 1}")
    assert "tools" in refusal("chat", model_folder, "--tools", "task.py:nothing")
