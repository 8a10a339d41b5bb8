"""recipes/warm_up.py: from demonstrations to a model that says them, in the tokens of a rollout."""

import json
import sys
from pathlib import Path

import pytest

from agent_r1_trl.environments.factory import tool_schemas
from agent_r1_trl.evaluation import evaluate_model
from agent_r1_trl.objects import import_object
from agent_r1_trl.recording.dataset import sft_rows
from agent_r1_trl.testing import AddEnv, call, make_policy, make_tokenizer, roll_out, say

SCRIPT = Path(__file__).resolve().parents[1] / "recipes" / "warm_up.py"


@pytest.mark.slow
def test_a_model_says_what_it_was_shown(tmp_path, monkeypatch):
    tokenizer, start, out = make_tokenizer("qwen2_5"), tmp_path / "model", tmp_path / "start"
    make_policy(tokenizer).save_pretrained(start)
    tokenizer.save_pretrained(start)
    rows = [{"prompt": "What is 2 + 3?"}]
    shown = roll_out(AddEnv, [call("add", a=2, b=3), say("even")], rows)
    file = tmp_path / "demonstrations.jsonl"
    (row,) = sft_rows(shown, min_reward=1.0, tools=tool_schemas(AddEnv))
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    options = ["--num_train_epochs", "60", "--learning_rate", "1e-2", "--disable_tqdm", "true", "--use_cpu", "true"]
    given = ["--model", str(start), "--demonstrations", str(file), "--output_dir", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given, *options])
    import_object(f"{SCRIPT}:main", "script")()
    before, after = (evaluate_model(str(path), AddEnv, rows) for path in (start, out))
    assert before.trajectories[0].final_text != "even"
    assert [result.content for result in after.trajectories[0].tool_results] == ["5"]
    assert after.trajectories[0].final_text == "even"
