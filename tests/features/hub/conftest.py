"""A stand-in for the Hub with somebody logged in, and the output directory of a run."""

import json

import pytest
import yaml

from agent_r1_trl import safe_text
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.testing import make_policy, make_tokenizer
from tests.hub import TOKEN, running_hub
from tests.recording.examples import two_turns


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
        safe_text.set_rules()


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tokenizer = make_tokenizer("qwen3")
    make_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


RECIPE = {
    "trainer": "grpo",
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "env": "agent_r1_trl.testing.toys.AddEnv",
    "dataset_name": "data/train.jsonl",
    "eval_dataset_name": "hotpotqa/hotpot_qa",
    "advantage_estimator": "grpo",
    "max_turns": 4,
}
RESULTS = {
    "exact_match": 0.625,
    "turns": 2.5,
    "call_error_rate": None,
    "num_examples": 40,
    "num_generations": 1,
    "intervals": {"exact_match": [0.5, 0.75], "turns": [2.25, 2.75], "call_error_rate": [None, None]},
    "duration_s": 3.0,
    "settings": {"temperature": 0.0},
}


def write_history(folder):
    """What was logged in three steps; drawing it takes the better part of a second."""
    history = [{"step": step, "reward": step / 4, "loss": 0.5 / step} for step in (1, 2, 3)]
    history.append({"step": 3, "eval_reward": 0.5})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


@pytest.fixture
def run_folder(tmp_path, saved_model):
    """What a run leaves, and what it leaves besides that nobody should get."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in saved_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "evaluation.json").write_text(json.dumps(RESULTS))
    (folder / "trainer_state.json").write_text('{"log_history": []}')
    (folder / "critic").mkdir()
    (folder / "critic" / "critic.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for name in ("training_args.bin", "journal/a.jsonl", "checkpoint-1/config.json", "optimizer.pt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("private")
    store = TrajectoryStore(folder)
    store.write(1, [two_turns(generation=index) for index in range(3)])
    store.write(1, [two_turns(outcome_reward=0.1, reward_parts={})], split="eval")
    return folder
