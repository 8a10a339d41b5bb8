"""A new user's path, with the commands: quickstart, eval, chat, serve, merge, push, and back from the Hub.

The quickstart is shortened to two steps. Every later step has to repeat what `eval` recorded of the trained agent,
which is sampled greedily: the same tokens in a chat, the same calls and answer through vLLM and the client of OpenAI,
the same log-probabilities from the merged model, the same rows from the data set on the Hub.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl import SearchQAEnv
from agent_r1_trl.cli import main
from agent_r1_trl.recording import read_trajectories
from agent_r1_trl.tools import as_tool
from tests.features.serve.test_serve import merged_and_served
from tests.hub import TOKEN, running_hub

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
NUM_EXAMPLES = 12


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """The output directory of the quickstart, evaluated with all baselines."""
    out = tmp_path_factory.mktemp("quickstart") / "agent"
    command = [sys.executable, "recipes/quickstart/run.py", "--max_steps", "2", "--num_examples", str(NUM_EXAMPLES)]
    subprocess.run([*command, "--output_dir", str(out)], cwd=ROOT, check=True, env=os.environ | path())
    evaluation = ["eval", "--config", str(out / "recipe.yaml"), "--model", str(out), "--output_dir", str(out)]
    baselines = ["--baselines", "base", "naive_rag", "closed_book", "--num_examples", str(NUM_EXAMPLES)]
    with contextlib.chdir(ROOT):  # the recipe's paths start here
        assert main([*evaluation, *baselines]) == 0
    return out


@pytest.fixture
def rolled_out(agent, monkeypatch):
    """A trajectory of the evaluation with a search and an answer."""
    monkeypatch.chdir(ROOT)
    found = [item for item in read_trajectories(agent / "evaluation" / "test" / "model") if len(item.turns) > 1]
    return next(item for item in found if item.stop_reason.value == "done" and "<answer>" in item.final_text)


def path():
    """The environment variable with which a shell finds `agent-r1-trl`."""
    return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_the_quickstart_trains_and_leaves_its_recipe(agent):
    before, after = (
        load_file(ROOT / "recipes/quickstart/model/model.safetensors"),
        load_file(agent / "model.safetensors"),
    )
    assert before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)
    recipe = yaml.safe_load((agent / "recipe.yaml").read_text())
    started = yaml.safe_load((ROOT / "recipes/quickstart/grpo/config_cpu.yaml").read_text())
    given = started["env_kwargs"]
    assert {name: recipe["env_kwargs"][name] for name in given} == given and recipe["max_steps"] == 2


def test_the_evaluation_has_the_quickstarts_figures_beside_the_baselines(agent):
    rows = {row["method"]: row for row in json.loads((agent / "evaluation" / "evaluation.json").read_text())["rows"]}
    assert list(rows) == ["base", "naive_rag", "closed_book", "model"]
    for method, name in {"base": "before", "model": "after"}.items():
        result = json.loads((agent / name / "evaluation.json").read_text())
        metrics = {metric: value for metric, value in result.items() if isinstance(value, float)}
        del metrics["duration_s"]
        assert metrics["exact_match"] > 0 and {metric: rows[method][metric] for metric in metrics} == metrics
    assert [(rows[name]["turns"], rows[name]["tool_calls"]) for name in ("naive_rag", "closed_book")] == [
        (1, 1),
        (1, 0),
    ]
    assert rows["base"]["tool_calls"] > 1 and rows["closed_book"]["num_examples"] == NUM_EXAMPLES


def test_a_chat_says_what_the_evaluation_said(agent, rolled_out, monkeypatch, capsys, tmp_path):
    lines = [rolled_out.prompt_messages[-1]["content"], f"/save {tmp_path / 'said.jsonl'}", "/quit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", str(agent), "--config", str(agent / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert out.count("→ search(query=") == len(rolled_out.tool_results) and rolled_out.final_text in out
    (said,) = read_trajectories(tmp_path / "said.jsonl")
    assert (said.prompt_ids, said.completion_ids) == (rolled_out.prompt_ids, rolled_out.completion_ids)
    assert said.action_mask == rolled_out.action_mask


@pytest.mark.vllm
@pytest.mark.release
def test_an_evaluation_with_vllm_samples_the_same(agent, rolled_out, tmp_path):
    command = ["eval", "--config", str(agent / "recipe.yaml"), "--model", str(agent), "--output_dir", str(tmp_path)]
    flags = ["--use_vllm", "true", "--num_examples", str(NUM_EXAMPLES)]
    subprocess.run([sys.executable, "-m", "agent_r1_trl.cli", *command, *flags], cwd=ROOT, check=True)
    (same,) = (item for item in read_trajectories(tmp_path) if item.prompt_ids == rolled_out.prompt_ids)
    assert same.completion_ids == rolled_out.completion_ids


@pytest.mark.vllm
@pytest.mark.release
def test_a_client_of_openai_with_tools_of_its_own_hears_the_same_through_vllm(agent, rolled_out, tmp_path):
    openai = pytest.importorskip("openai")
    env = SearchQAEnv(**yaml.safe_load((agent / "recipe.yaml").read_text())["env_kwargs"])
    (search,) = map(as_tool, env.tools)
    env.reset({"question": rolled_out.prompt_messages[-1]["content"], "answers": ["?"]})
    messages = [dict(message) for message in rolled_out.prompt_messages]
    with merged_and_served(agent, tmp_path, "quick", 512) as url:
        client = openai.OpenAI(base_url=url, api_key="none")
        made = []
        for _ in rolled_out.turns:
            answer = client.chat.completions.create(
                model="quick", messages=messages, tools=[search.schema], temperature=0, max_tokens=48
            )
            (choice,) = answer.choices
            messages.append(choice.message.model_dump(exclude_none=True))
            for asked in choice.message.tool_calls or ():
                made.append((asked.function.name, json.loads(asked.function.arguments)))
                found = search(**made[-1][1])
                messages.append({"role": "tool", "tool_call_id": asked.id, "content": found})
    asked = [call["function"] for message in rolled_out.messages for call in message.get("tool_calls") or ()]
    assert made == [(function["name"], function["arguments"]) for function in asked] and made
    assert choice.finish_reason == "stop" and choice.message.content == rolled_out.final_text


def test_the_merged_model_has_the_log_probabilities_of_the_rollout(agent, rolled_out, tmp_path):
    assert main(["merge", str(agent), "--output_dir", str(tmp_path / "plain")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    ids = torch.tensor([rolled_out.prompt_ids + rolled_out.completion_ids])
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].log_softmax(-1)
    found = scores.gather(1, ids[0, 1:, None])[-len(rolled_out.completion_ids) :, 0]
    mask = torch.tensor(rolled_out.action_mask, dtype=torch.bool)
    assert mask.sum() > 10 and (found - torch.tensor(rolled_out.logprobs))[mask].abs().max() < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert tokenizer.chat_template == (agent / "chat_template.jinja").read_text()


@pytest.mark.release
def test_what_was_pushed_comes_back_from_the_hub_and_starts_with_the_lines_of_the_card(agent, rolled_out, tmp_path):
    with running_hub() as hub:
        env = os.environ | path()
        env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

        def shell(line, text=""):
            return subprocess.run(
                ["bash", "-ec", line], env=env, input=text, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
            ).stdout

        shell(f"agent-r1-trl push {agent} --repo_id ada/quick")
        shell(f"agent-r1-trl push {agent} --repo_id ada/runs --trajectories")
        card = ModelCard(hub.files("ada/quick")["README.md"].decode())
        install, chat = re.search(r"```bash\n(.*)\n(.*)\n```", card.text).groups()
        question = rolled_out.prompt_messages[-1]["content"]
        out = shell(chat, f"{question}\n/save {tmp_path / 'said.jsonl'}\n")
        load = "from datasets import load_dataset; load_dataset('ada/runs').save_to_disk('{}')"
        shell(f'{sys.executable} -c "{load.format(tmp_path / "rows")}"')
    assert install == "pip install agent-r1-trl" and rolled_out.final_text in out
    (said,) = read_trajectories(tmp_path / "said.jsonl")
    assert (said.prompt_ids, said.completion_ids) == (rolled_out.prompt_ids, rolled_out.completion_ids)
    scores = json.loads((agent / "evaluation" / "evaluation.json").read_text())["rows"][-1]
    assert f"{scores['exact_match']:.4g} (" in card.text and "| naive\\_rag |" in card.text
    check_rows(tmp_path / "rows", agent)


def check_rows(folder, agent):
    """The data set has a row for every recorded trajectory of the training, number for number."""
    from datasets import load_from_disk

    rows = load_from_disk(str(folder))["train"]
    recorded = list(read_trajectories(agent))
    assert len(rows) == len(recorded) == 2 * 128
    for row, trajectory in zip(rows, recorded, strict=True):
        assert row["completion_ids"] == trajectory.completion_ids and row["advantages"] == trajectory.advantages
        assert row["reward"] == trajectory.total_reward
