"""What `train` says of a broken reward, tool, template or rate: in which step, and with which exit code.

One table of real runs: the quickstart's cold start calls `search` in nearly every trajectory.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from agent_r1_trl.cli import main

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
TASK = """
import socket
import time

from agent_r1_trl import ToolEnv, tool


@tool(attempts=1, timeout_s=0.2)
def search(query: str) -> str:
    \"\"\"Search the corpus.

    Args:
        query: What to look for.
    \"\"\"
    {tool}


def score(completions, **columns):
    return {score}


class Task(ToolEnv):
    tools = (search,)
    tool_call_reward = tool_error_reward = 0.0

    def outcome_reward(self, trajectory):
        {reward}
"""
WORKS, LENGTH = "return f'{query}: The capital is Bern.'", "return float(len(trajectory.completion_ids) % 7)"
ROWS = {
    # name: (tool, reward, settings, exit code, what is said); the setting `score` is what the functions return
    "reward 0": (
        WORKS, "return 0.0", {}, 0,
        "Step 1: All 8 trajectories earned exactly 0: .*has learned nothing",
    ),
    "reward raises": (
        WORKS, "return self.example['solution']", {}, 2,
        r"Task.outcome_reward raised KeyError: 'solution' \(.*task.py, line 27\)\. Correct the method\. .*example '",
    ),
    "reward function raises": (
        WORKS, LENGTH, {"reward_funcs": "task.py:score", "score": "columns['gold']"}, 2,
        r"error: reward_funcs: score raised KeyError: 'gold' \(.*task.py, line 19\)\. Correct .* in example '\d+'",
    ),
    "reward function returns no number": (
        WORKS, LENGTH, {"reward_funcs": "task.py:score", "score": "[float('nan')] * 8"}, 2,
        r"error: reward_funcs: score returned nan for Trajectory\(example_id='\d+'",
    ),
    "judge down": (
        WORKS, LENGTH, {"reward_funcs": "task.py:score", "score": "socket.create_connection(('127.0.0.1', 9), 1)"}, 3,
        r"error: reward_funcs: score raised ConnectionRefusedError",
    ),
    "tool raises": (
        "raise OSError('no index')", LENGTH, {}, 3,
        "'search' has never worked: .*no index.*by hand",
    ),
    "tool has a bug": (
        "return {}['index']", LENGTH, {}, 0,
        "'search': 8 of its last 8 calls failed.*none has ever succeeded.*All .* calls of the tool 'search' failed",
    ),
    "tool too slow": (
        "time.sleep(0.5)", LENGTH, {}, 3,
        "'search' has never worked: .*timeout_s",
    ),
    "tool silent": (
        "return ''", LENGTH, {}, 0,
        "Step 1: All .* answers of the tool 'search' were empty. Try the tool by hand",
    ),
    "template without tools": (
        WORKS, LENGTH, {"model_name_or_path": "plain"}, 2,
        r"chat template cannot render tool.*\['search'\].*Set chat_template",
    ),
    "rate x100": (
        WORKS, "return float('<answer>' in trajectory.final_text) * 10 - len(trajectory.turns)",
        {"learning_rate": 0.1, "max_steps": 5, "per_device_train_batch_size": 64, "num_generations": 4}, 0,
        "The reward fell: the model at the end is worse.*Set a lower learning_rate",
    ),
}  # fmt: skip


MARKS = {
    "rate x100": pytest.mark.release, "reward function returns no number": pytest.mark.matrix,
    "judge down": pytest.mark.matrix, "tool too slow": pytest.mark.matrix,
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in ROWS])
def test_what_is_said_and_the_exit_code(name, tmp_path, monkeypatch, capsys, caplog):
    tool, reward, settings, code, said = ROWS[name]
    monkeypatch.chdir(tmp_path)
    score = settings.get("score", "None")
    Path("task.py").write_text(TASK.replace("{tool}", tool).replace("{reward}", reward).replace("{score}", score))
    rows = [json.loads(line) for line in (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:64]]
    rows = [{"id": str(number), "prompt": row["question"]} for number, row in enumerate(rows)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(QUICKSTART / "model", "plain")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    Path("plain/chat_template.jinja").write_text(template)
    recipe = {
        "model_name_or_path": str(QUICKSTART / "model"), "dtype": "float32", "env": "task.py:Task",
        "dataset_name": "rows.jsonl", "max_turns": 3, "max_tokens_per_turn": 48, "max_completion_length": 200,
        "num_generations": 2, "per_device_train_batch_size": 8, "learning_rate": 5e-4, "lr_scheduler_type": "constant",
        "max_steps": 1, "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "output_dir": "out",
        "save_strategy": "no", "report_to": "none", "beta": 0.0,
    } | {key: value for key, value in settings.items() if key != "score"}  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "--config", "recipe.yaml"]) == code
    printed = capsys.readouterr()
    text = " ".join((caplog.text + printed.out + printed.err).split())
    assert re.search(said, text), text[-2000:]
    assert ("Done." in printed.out) is (code == 0) and "Traceback" not in printed.err
