"""`push_to_hub` of a trainer against a stand-in for the Hub: what arrives, and what stays."""

import json
import logging

import pytest
from transformers.utils.hub import hf_api

from agent_r1_trl.features.hub.card import split_card
from agent_r1_trl.features.hub.secret_scan import SecretFoundError
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.features.hub.conftest import RESULTS, hub  # noqa: F401
from tests.features.hub.secrets import secret_like
from tests.hub import TOKEN
from tests.trainers.helpers import make_trainer


@pytest.fixture
def pushed(hub, tmp_path, monkeypatch):  # noqa: F811
    """Trains for a step and pushes; gives the trainer a place and returns what arrived."""
    monkeypatch.setattr(hf_api(), "endpoint", hub.url)

    def push(**options):
        trainer = make_trainer(tmp_path, hub_model_id="ada/adder", **options)
        trainer.train()
        trainer.push_to_hub(dataset_name="data/train.jsonl")
        return hub.files("ada/adder")

    return push


def test_the_files_of_a_trainer_arrive_as_they_are_with_a_card_that_the_hub_takes(pushed, tmp_path, monkeypatch):
    (tmp_path / "evaluation.json").write_text(json.dumps(RESULTS))
    files = pushed(max_steps=2)
    for name, content in files.items():
        assert content == (tmp_path / name).read_bytes(), name
    wanted = {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}
    assert wanted < set(files) and "training_args.bin" not in files
    metadata, body = split_card(files["README.md"].decode())
    assert "datasets" not in metadata and "huggingface.co/datasets/data" not in body
    assert f"| exact\\_match | {RESULTS['exact_match']}" in body
    assert "\nagent-r1-trl chat ada/adder --env agent_r1_trl.testing.toys.AddEnv\n```" in body
    assert "None" not in body.split("##")[1]


def test_a_secret_stops_the_upload_of_a_trainer_until_its_file_is_allowed(pushed, hub, tmp_path):  # noqa: F811
    (tmp_path / "notes.txt").write_text(f"first\n{TOKEN}")
    with pytest.raises(SecretFoundError, match=r"notes.txt, line 2: Hugging Face token") as refusal:
        pushed()
    assert TOKEN not in str(refusal.value) and "push.allow_secrets: notes.txt" in str(refusal.value)
    assert hub.files("ada/adder") == {}
    assert "notes.txt" in pushed(push={"allow_secrets": ["notes.*"]})


def test_a_secret_in_a_checkpoint_is_logged_and_training_goes_on(pushed, hub, tmp_path, caplog):  # noqa: F811
    (tmp_path / "notes.txt").write_text(secret_like("-----BEGIN {pem}PRIVATE KEY-----"))
    trainer = make_trainer(
        tmp_path, hub_model_id="ada/adder", push_to_hub=True, save_strategy="steps", save_steps=1, max_steps=2
    )
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert "notes.txt, line 1: private key" in caplog.text and trainer.state.global_step == 2
    assert hub.files("ada/adder") == {}


@pytest.mark.parametrize("asked", [False, True])
def test_the_critic_is_uploaded_only_if_asked(pushed, asked):
    files = pushed(trainer=MultiTurnPPOTrainer, push={"critic": asked}, critic="head")
    assert ("critic/critic.safetensors" in files) == asked


def test_an_evaluation_that_cannot_be_read_costs_no_training(pushed, tmp_path, caplog):
    (tmp_path / "evaluation.json").write_text("{")
    pushed()
    assert "evaluation.json: cannot be read" in caplog.text
