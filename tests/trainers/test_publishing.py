"""What is saved loads as a plain model, with the template it was trained with and a card of our own."""

import json

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl.chat import ChatFormat
from tests.toys import add
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


def test_a_lora_run_saves_an_adapter_that_loads_on_the_base(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer.train()
    trainer.save_model(tmp_path / "final")
    assert (tmp_path / "final" / "adapter_model.safetensors").exists()
    base = make_trainer(tmp_path).model
    loaded = PeftModel.from_pretrained(base, tmp_path / "final").eval()
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_card_names_method_papers_environment_tools_and_metrics(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.create_model_card(model_name="adder", dataset_name="sums", tags="arithmetic")
    card = (tmp_path / "README.md").read_text()
    for text in (
        "# adder", "MultiTurnGRPOTrainer", "AddEnv", "2511.14460", "2504.20073", "| max_turns | 8 |", "`add`",
        json.dumps(add.schema["function"]["parameters"]), "| reward |", "arithmetic", "agent-r1-trl", "datasets: sums",
    ):  # fmt: skip
        assert text in card, text


def test_a_card_without_environment_is_written_too(tmp_path):
    trainer = make_trainer(
        tmp_path, env=None, script=None, reward_funcs=lambda completions, **kwargs: [1.0] * len(completions)
    )
    trainer.create_model_card()
    assert "agent-r1-trl" in (tmp_path / "README.md").read_text()
