"""What the critic sees, saves and leaves alone, in a whole trainer."""

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from agent_r1_trl.critic.attach import ValueHead, critic_parameters, is_critic_name
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.effort import nightly
from tests.trainers.helpers import PlainEnv, Remember, questions, scored_batch
from tests.trainers.test_ppo_trainer import KINDS, lora, make_ppo, random_head

# -------------------------------------------------------------------- precision


def test_the_value_head_is_float32_under_autocast():
    head, hidden = ValueHead(16), torch.randn(2, 3, 16)
    torch.nn.init.normal_(head.weight)
    expected = head(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(hidden), expected)
    assert head.bfloat16()(hidden.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_and_loss_agree_under_mixed_precision(tmp_path, kind):
    """Before training starts accelerate has not wrapped the model: the scoring pass sees to its precision itself."""
    trainer = make_ppo(tmp_path, kind, bf16=True)
    random_head(trainer)
    batch = scored_batch(trainer)
    trainer.compute_loss(trainer.model, batch)
    error = (batch["returns"] - batch["old_values"])[batch["value_mask"]]
    expected = 0.5 * (error**2).mean().item()
    assert trainer._take_value_metrics()["critic/value_loss"] == pytest.approx(expected, rel=1e-5)


# -------------------------------------------------------------------- dropout, reference


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_disable_dropout_reaches_the_critic(tmp_path, kind):
    tokenizer = make_tokenizer("qwen3")
    options = {"peft_config": LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")}
    if kind == "model":
        backbone = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)).transformer
        options = {"critic_model": backbone}  # with dropout of its own
    trainer = make_ppo(tmp_path, kind, disable_dropout=True, **options)
    rates = {name: m.p for name, m in trainer.model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert any(is_critic_name(name) for name in rates)
    assert set(rates.values()) == {0}


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_synced_reference_follows_the_policy_alone(tmp_path, kind, policy_path):
    trainer = make_ppo(
        tmp_path, kind, model=policy_path, beta=0.04, sync_ref_model=True, ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.25, max_steps=1,
    )  # fmt: skip
    start = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
    trainer.train()
    policy = dict(trainer.model.named_parameters())
    assert any(not torch.equal(start[name], policy[name]) for name in start)
    for name, value in trainer.ref_model.named_parameters():
        torch.testing.assert_close(value, 0.75 * start[name] + 0.25 * policy[name], msg=name)


# -------------------------------------------------------------------- checkpoints


class Worse(MultiTurnPPOTrainer):
    """Its first checkpoint is its best."""

    def evaluate(self, *args, **kwargs):
        return {"eval_loss": float(self.state.global_step)}


@pytest.mark.parametrize("kind", ["adapter", "head", *nightly("model")])
def test_the_best_model_brings_its_critic(tmp_path, kind, monkeypatch):
    memory, said = Remember(), []
    monkeypatch.setattr("transformers.trainer.logger.warning", said.append)
    trainer = make_ppo(
        tmp_path, kind, trainer=Worse, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", eval_dataset=questions(),
        callbacks=[memory], critic_learning_rate=1e-2, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert not [text for text in said if "keys" in text], "the critic has a file of its own"
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(value, memory.seen[1][name], msg=name)
    assert all(
        not torch.equal(memory.seen[1][name], memory.seen[2][name])
        for name in critic_parameters(trainer.model)
        if "value_head" in name
    )


@pytest.mark.parametrize("with_tokens", [True, *nightly(False)])
def test_a_resumed_run_with_whole_modules_goes_on_as_if_never_stopped(tmp_path, with_tokens):
    whole = {"trainable_token_indices": [5, 6, 7]} if with_tokens else {"modules_to_save": ["embed_tokens"]}
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **whole)
    options = {
        "save_strategy": "steps", "save_steps": 1, "max_steps": 2, "peft_config": config, "beta": 0.04,
        "per_device_train_batch_size": 2, "script": None, "env": PlainEnv, "max_completion_length": 8,
    }  # fmt: skip
    straight = make_ppo(tmp_path, "adapter", **options)
    straight.train()
    resumed = make_ppo(tmp_path, "adapter", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for (name, one), (_, two) in zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)
    embeddings = [name for name in critic_parameters(straight.model) if "embed_tokens" in name]
    assert embeddings
    assert all(parameter.requires_grad for parameter in critic_parameters(straight.model).values())


def test_an_existing_adapter_is_trained_further_with_a_critic_and_a_reference(tmp_path):
    """TRL keeps the adapter that it was given as a third one, `ref`."""
    from peft import get_peft_model

    model = get_peft_model(make_policy(make_tokenizer("qwen3")), lora())
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trainer = make_ppo(tmp_path, "adapter", model=model, peft_config=None, beta=0.04, max_steps=2)
    start = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    twins = [name for name in start if ".critic." in name]
    assert all(torch.equal(start[name], start[name.replace(".critic.", ".default.")]) for name in twins)
    trainer.train()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, start[name])}
    assert not any(".ref." in name or "base_layer" in name for name in moved)
    assert any(".default." in name for name in moved)
    assert any(".critic." in name for name in moved)
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "ref").exists()
