"""What is saved loads as a plain model, with the template it was trained with and a card."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import hf_api

from agent_r1_trl import safe_text
from agent_r1_trl.advantages.estimators import ESTIMATORS
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation.vllm.build import ADAPTER_FOLDER
from agent_r1_trl.testing import AddEnv, add
from agent_r1_trl.tools import tool
from tests.trainers.helpers import make_trainer


def test_a_saved_model_loads_with_its_chat_template(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer.chat_template == trainer.chat.chat_template
    messages = [{"role": "user", "content": "hello"}]
    assert ChatFormat(tokenizer).encode_prompt(messages, [add.schema]) == trainer.chat.encode_prompt(
        messages, [add.schema]
    )
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(model(ids).logits, trainer.model.eval()(ids).logits)


def test_the_card_is_trls_with_environment_tools_settings_result_and_method(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.base_trainer.get_trackio_space_url", lambda: "https://trackio.example/adder")
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.create_model_card(model_name="adder", dataset_name="sums", tags="arithmetic")
    card = (tmp_path / "README.md").read_text()
    for text in (
        # TRL's own
        "datasets: sums", "- arithmetic", "- agent-r1-trl", "# Model Card for adder",
        "fine-tuned version of a local checkpoint", "https://trackio.example/adder", "@misc{cheng2025agentr1",
        "MultiTurnGRPO", "- TRL:",
        # ours
        "- Agent-R1-TRL:", "AddEnv", "`add`", json.dumps(add.schema["function"]["parameters"]), "| max_turns | 8 |",
        "| scale_rewards | group |", "| reward |", "`grpo` (mean of the group",
        "2511.14460", "2504.20073", "2402.03300",
    ):  # fmt: skip
        assert text in card, text
    assert "licence: license" not in card and str(tmp_path.parent) not in card
    headings = [line for line in card.splitlines() if line.startswith("## ")]
    assert headings == [
        f"## {name}"
        for name in (
            "Quick start", "Training procedure", "Environment", "Tools", "Training settings", "Metrics", "Method",
            "Citations",
        )
    ]  # fmt: skip


def test_every_estimator_has_a_card_with_its_settings_and_papers(tmp_path):
    trainer = make_trainer(tmp_path)
    for row in ESTIMATORS.values():
        trainer.args.advantage_estimator = row.name
        trainer.create_model_card()
        card = (tmp_path / "README.md").read_text()
        assert row.papers and all(arxiv_id in card for _, arxiv_id in row.papers), row.name
        assert f"`{row.name}` ({row.baseline}; {row.credit})" in card
        assert all(f"| {option} |" in card for option in row.options if hasattr(trainer.args, option)), row.name


def test_what_a_tools_author_wrote_cannot_add_markup_to_the_card(tmp_path):
    @tool
    def lookup(word: str) -> str:
        """Look up</details><script>alert(1)</script> `x`.

        ## Citations

        | a | [click](http://evil.example) |

        Args:
            word: ``` <b>what</b>
        """
        return word

    class HostileEnv(AddEnv):
        tools = (lookup,)

    trainer = make_trainer(tmp_path, env=HostileEnv)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "alert(1)" not in card and r"\<script\>alert\(1\)\</script\>" in card
    assert "[click](http" not in card and card.count("\n## Citations") == 1
    fence = card[card.index("```json") :].splitlines()
    assert fence[2].strip() == "```", "the schema is one line, so that nothing in it closes the block"


# ---------------------------------------------------------------- uploads


@pytest.fixture
def uploads(monkeypatch):
    """The relative paths of the files in each upload, which goes nowhere."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    sent: list[list[str]] = []

    def upload_folder(self, *, folder_path, ignore_patterns=None, **kwargs):
        files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        sent.append(sorted(filter_repo_objects(files, ignore_patterns=ignore_patterns)))

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return sent


@pytest.mark.parametrize("asked", [False, True])
def test_trajectories_are_uploaded_only_if_asked(tmp_path, uploads, asked):
    trainer = make_trainer(tmp_path, record_trajectories="jsonl", push={"trajectories": asked})
    trainer.train()
    (tmp_path / "trajectories" / "superseded").mkdir()
    (tmp_path / "trajectories" / "superseded" / "step_000000.1.jsonl").touch()
    of_eval = ("test/model/trajectories", "test/model/journal")  # of several rows
    for folder in ("completions", "journal", ADAPTER_FOLDER, *of_eval):
        (tmp_path / folder).mkdir(exist_ok=True, parents=True)
        (tmp_path / folder / "rows.parquet").touch()
    (tmp_path / "inspector.html").touch()
    trainer.hub_model_id = "nobody/adder"
    trainer.push_to_hub()
    trainer.save_model(str(tmp_path / "checkpoint-1"))
    trainer.push_in_progress = None  # as with push_to_hub=True
    trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert len(uploads) == 2
    for files in uploads:
        assert {"README.md", "config.json", "tokenizer.json"} <= set(files)
        assert any(name.startswith("trajectories/") for name in files) == asked
        assert any(name.startswith("completions/") for name in files) == asked
        assert ("inspector.html" in files) == asked, "it holds them"
        assert ("test/model/trajectories/rows.parquet" in files) == asked
        assert not any("journal/" in name or name.startswith(ADAPTER_FOLDER) for name in files)
        assert not any(name.startswith("checkpoint-") for name in files)  # the Trainer's own patterns still hold
    hf_api().upload_folder(folder_path=str(tmp_path))
    assert any(name.startswith("journal/") for name in uploads[-1]), "uploads of others are as before"


# ---------------------------------------------------------------- logs


def test_a_row_that_no_reward_function_scored_is_not_logged(tmp_path, caplog):
    class Unscored(AddEnv):
        def reset(self, example):
            if example["id"] == "q0":
                raise RuntimeError("down")
            return super().reset(example)

    trainer = make_trainer(
        tmp_path,
        env=Unscored,
        train_dataset=Dataset.from_list([{"id": f"q{i}", "prompt": "question", "secret": "SECRET"} for i in range(2)]),
    )
    trainer.train()
    assert "reward functions returned None" not in caplog.text, "an environment failed, no reward function"
    assert "RuntimeError: down" in caplog.text and "SECRET" not in caplog.text


KEY = "sk-live-0123456789"


@pytest.fixture
def key(monkeypatch):
    """A secret in the environment of the process; the rules are the defaults again afterwards."""
    monkeypatch.setenv("SEARCH_API_KEY", KEY)
    yield KEY
    safe_text.set_rules()


class LeakyEnv(AddEnv):
    """Its prompt shows a secret, a number that only the user's own pattern knows, and an escape sequence."""

    def reset(self, example):
        return [{"role": "user", "content": f"{KEY} 1234-5678 \x1b[2J {example['pin']}"}]


def written(folder):
    """Every text that a run wrote about its trajectories."""
    (table,) = (folder / "completions").glob("*.parquet")
    records = (folder / "trajectories" / "step_000001.jsonl").read_text(encoding="utf-8")
    return [*pd.read_parquet(table)["prompt"].map(str), *records.splitlines()]


def leaky_run(tmp_path, **options):
    rows = Dataset.from_list([{"id": "q0", "pin": "pin-998877"}, {"id": "q1", "pin": "pin-998877"}])
    options = {"log_completions": True, "record_trajectories": "jsonl", **options}
    make_trainer(tmp_path, env=LeakyEnv, train_dataset=rows, **options).train()
    return written(tmp_path)


def test_secrets_are_masked_in_records_and_in_the_table_of_completions(tmp_path, key, capsys):
    texts = leaky_run(tmp_path / "default")
    assert texts and all("[secret: SEARCH_API_KEY]" in text and KEY not in text for text in texts)
    assert all("pin-998877" in text and "1234-5678" in text for text in texts)
    assert "\x1b[2J" not in capsys.readouterr().out, "the table cannot control the terminal"
    texts = leaky_run(tmp_path / "own", secrets={"names": "^pin$", "patterns": [r"\b\d{4}-\d{4}\b"]})
    assert all("[secret: pin]" in text and "pin-998877" not in text and KEY in text for text in texts)
    assert all("[secret]" in text and "1234-5678" not in text for text in texts)
