"""`merge`: a plain model whose log-probabilities are those of what was trained."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl.cli import main
from agent_r1_trl.critic.attach import is_critic_name
from agent_r1_trl.evaluation.agent import load_agent
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.families.configurations import build
from tests.hub import running_hub
from tests.trainers.helpers import make_trainer

IDS = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def base(tmp_path):
    """A model with its tokenizer on disk."""

    def save(dtype=torch.float32, *, is_tied=False):
        tokenizer = make_tokenizer("qwen3")
        model = make_policy(tokenizer)
        model.config.tie_word_embeddings = is_tied
        model.tie_weights()
        folder = tmp_path / "base"
        model.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save


def adapter(base, folder, **options):
    """A random adapter on disk, with what it computes."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return log_probs(model)


def log_probs(model):
    with torch.no_grad():
        return torch.log_softmax(model.eval()(IDS).logits.float(), dim=-1)


@pytest.mark.parametrize(
    ("options", "is_tied"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, False),
        ({"target_modules": "all-linear", "use_dora": True}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
        ({"target_modules": ["lm_head", "o_proj"]}, True),
        ({"target_modules": ["embed_tokens", "o_proj"]}, True),
        ({"target_modules": ["embed_tokens", "lm_head"]}, True),
        ({"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [7]}}, True),
    ],
)
def test_a_merged_adapter_computes_what_the_adapter_does(base, tmp_path, options, is_tied):
    folder = base(is_tied=is_tied)
    expected = adapter(folder, tmp_path / "adapter", **options)
    assert main(["merge", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged, "peft_config")
    assert (log_probs(merged) - expected).abs().max() < 1e-5
    assert (expected - log_probs(AutoModelForCausalLM.from_pretrained(folder))).abs().max() > 0.01
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize(
    ("options", "is_still_tied"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, False),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"]}, True),
    ],
)
def test_the_configuration_says_whether_the_ends_share_a_weight(base, tmp_path, options, is_still_tied):
    """vLLM goes by it, and would take one weight for both."""
    expected = adapter(base(is_tied=True), tmp_path / "adapter", **options)
    assert main(["merge", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged")]) == 0
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["tie_word_embeddings"] == is_still_tied
    assert ("lm_head.weight" in load_file(tmp_path / "merged/model.safetensors")) == (not is_still_tied)
    assert (log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - expected).abs().max() < 1e-5


@pytest.fixture
def shared_layers(tmp_path):
    """A model whose two attention blocks share their weights, saved with a tokenizer."""
    tokenizer = make_tokenizer("qwen3")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = build("zamba2", vocabulary=len(tokenizer), **ids)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name.endswith("q_proj.weight")]
    assert len(names) > len([name for name, _ in model.named_parameters() if name.endswith("q_proj.weight")])
    folder = tmp_path / "shared"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_an_adapter_beside_layers_that_share_their_weights_is_merged(shared_layers, tmp_path):
    expected = adapter(shared_layers, tmp_path / "adapter", target_modules=["in_proj"])
    assert main(["merge", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (log_probs(merged) - expected).abs().max() < 1e-5
    assert (
        load_file(tmp_path / "merged/model.safetensors").keys()
        == load_file(f"{shared_layers}/model.safetensors").keys()
    )


def test_an_adapter_that_parts_layers_which_share_their_weights_is_refused(shared_layers, tmp_path, refusal):
    """The family loads one weight for all of them."""
    adapter(shared_layers, tmp_path / "adapter", target_modules=["q_proj"])
    message = refusal("merge", tmp_path / "adapter", "--output_dir", tmp_path / "out")
    assert "share one weight" in message and "q_proj.weight" in message and "agent-r1-trl serve" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_adapter_of_the_hub_is_merged_with_its_own_tokenizer(base, tmp_path):
    expected = adapter(base(), tmp_path / "adapter", target_modules=["q_proj"])
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = "{# of the training #}" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "adapter")
    with running_hub() as hub:
        files = (path for path in (tmp_path / "adapter").rglob("*") if path.is_file())
        hub.repos["model", "ada/adapter"] = {path.name: path.read_bytes() for path in files}
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "agent_r1_trl.cli", "merge", "ada/adapter", "--output_dir"]
        subprocess.run([*command, str(tmp_path / "merged")], env=env, check=True)
    assert (log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - expected).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer.chat_template


def test_the_weights_are_rounded_once_to_the_type_of_the_base(base, tmp_path):
    expected = adapter(base(torch.bfloat16), tmp_path / "adapter", target_modules=["q_proj"])
    assert main(["merge", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "merged")]) == 0
    merged, _ = load_agent(str(tmp_path / "merged"), dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert (
        main(["merge", str(tmp_path / "adapter"), "--output_dir", str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    )
    wide = load_file(tmp_path / "wide/model.safetensors")
    for name, value in load_file(tmp_path / "merged/model.safetensors").items():
        assert torch.equal(value, wide[name].bfloat16()), name
    assert expected.shape == log_probs(merged).shape


@pytest.mark.parametrize(
    "critic", ["adapter", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("head", "model"))]
)
def test_the_critic_of_a_ppo_run_is_left_out(tmp_path, critic):
    policy = make_policy(make_tokenizer("qwen3"))
    policy.save_pretrained(tmp_path / "policy")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if critic == "adapter" else None
    trainer = make_trainer(
        tmp_path / "out", trainer=MultiTurnPPOTrainer, model=str(tmp_path / "policy"), critic=critic, peft_config=lora,
        num_generations=1, max_steps=1, learning_rate=0.1,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    expected = log_probs(trainer.model)
    assert main(["merge", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (log_probs(merged) - expected).abs().max() < 1e-5
    assert not [name for name in load_file(tmp_path / "merged/model.safetensors") if is_critic_name(name)]
    assert not (tmp_path / "merged/critic").exists()


def test_nothing_is_overwritten_and_the_source_stays(base, tmp_path, refusal):
    folder = base()
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    message = refusal("merge", folder, "--output_dir", folder)
    assert "is not empty. Pass a directory that does not exist" in message
    assert main(["merge", folder, "--output_dir", str(tmp_path / "new")]) == 0
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before
    assert not list(tmp_path.glob("*.unfinished"))


def test_what_cannot_be_merged_is_refused(base, tmp_path, refusal):
    assert "no such directory" in refusal("merge", "./nowhere", "--output_dir", tmp_path / "out")
    assert "neither config.json" in refusal("merge", tmp_path, "--output_dir", tmp_path / "out")
    assert "--output_dir" in refusal("merge", base())
    adapter(base(), tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    assert "gone" in refusal("merge", tmp_path / "adapter", "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_training_does_not_start_from_an_adapter_and_says_how_it_can(base, tmp_path, refusal):
    folder = base()
    adapter(folder, tmp_path / "adapter", target_modules=["q_proj"])
    run = ["--env", "agent_r1_trl.testing.toys:AddEnv", "--max_steps", "1", "--output_dir", tmp_path / "run"]
    message = refusal("train", "--model_name_or_path", tmp_path / "adapter", *run)
    assert f"model_name_or_path='{tmp_path}/adapter' is an adapter (LORA) of the model '{folder}'" in message
    assert f"agent-r1-trl merge {tmp_path}/adapter --output_dir" in message and "is_trainable=True" in message
    assert not (tmp_path / "run").exists()


def test_biases_of_lora_without_a_place_in_the_model_are_refused(base, tmp_path, refusal):
    adapter(base(), tmp_path / "adapter", target_modules=["o_proj"], lora_bias=True)
    message = refusal("merge", tmp_path / "adapter", "--output_dir", tmp_path / "out")
    assert "lora_bias=True" in message and "agent-r1-trl serve" in message


def test_an_adapter_with_nan_is_refused(base, tmp_path, refusal):
    from safetensors.torch import save_file

    adapter(base(), tmp_path / "adapter", target_modules=["q_proj"])
    file = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: value.fill_(float("nan")) for name, value in weights.items()}, file)
    assert "NaN" in refusal("merge", tmp_path / "adapter", "--output_dir", tmp_path / "out")


def test_a_full_disk_is_an_error_without_a_traceback(base, tmp_path, capsys):
    folder, (soft, hard) = base(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert main(["merge", folder, "--output_dir", str(tmp_path / "merged")]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = capsys.readouterr().err
    assert "merged': cannot be written (" in message and "). Free space there, or set another output_dir." in message
    assert not (tmp_path / "merged").exists()
