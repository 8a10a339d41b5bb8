"""Training with real vLLM engines: after every sync the sampler has the trainer's weights."""

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.generation import VLLMGenerator
from agent_r1_trl.generation.sync_probe import SyncError
from tests.servers import vllm_server
from tests.tokenizers import make_tokenizer
from tests.trainers.helpers import AddEnv, make_policy, make_trainer

pytestmark = pytest.mark.vllm

LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def make_vllm_trainer(tmp_path, **options):
    # vLLM's attention on a CPU wants heads of at least 32.
    policy = make_policy(make_tokenizer("qwen3"), hidden_size=64)
    defaults = {
        "use_vllm": True, "vllm_max_model_length": 512, "max_completion_length": 24, "max_steps": 2,
        "learning_rate": 0.02, "temperature": 0.9,
    }  # fmt: skip
    return make_trainer(tmp_path, script=None, env=AddEnv, model=policy, **(defaults | options))


def check_two_steps(trainer):
    """Train; both steps change the weights, and the second rollout is made with those of the first step."""
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    moved = max((value - before[name]).abs().max() for name, value in trainer.model.state_dict().items())
    assert moved > 1e-3, "nothing was learned, so nothing had to be synced"
    steps = [entry for entry in trainer.state.log_history if "sampling/importance_sampling_ratio/mean" in entry]
    assert len(steps) == 2
    for entry in steps:
        assert entry["sampling/sync_logprob_gap"] < 1e-4
        assert entry["sampling/sampling_logp_difference/max"] < 1e-4
        for kind in ("min", "mean", "max"):
            assert entry[f"sampling/importance_sampling_ratio/{kind}"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
def test_grpo_trains_with_vllm_in_process(tmp_path, peft_config):
    trainer = make_vllm_trainer(tmp_path, peft_config=peft_config)
    try:
        check_two_steps(trainer)
        assert isinstance(trainer.sampler.runner.generator, VLLMGenerator)
    finally:
        trainer.sampler.close()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))


def test_a_sampler_left_behind_stops_the_run(tmp_path, monkeypatch):
    trainer = make_vllm_trainer(tmp_path)
    monkeypatch.setattr(VLLMGenerator, "update_weights", only_at_the_start(VLLMGenerator.update_weights))
    try:
        with pytest.raises(SyncError, match="stale weights"):
            trainer.train()
        assert trainer.state.global_step == 1, "the first rollout was fine"
    finally:
        trainer.sampler.close()


def only_at_the_start(update):
    """The first two calls (the engine's start, the first rollout) pass."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) <= 2:
            update(*args, **kwargs)

    return counted


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with other weights than the trainers' full fine-tuning starts from."""
    folder = tmp_path_factory.mktemp("server")
    tokenizer = make_tokenizer("qwen3")
    make_policy(tokenizer, seed=3, hidden_size=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with vllm_server(folder / "model", folder) as url:
        yield url


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "merged lora"])
def test_grpo_trains_with_a_server(tmp_path, server, peft_config):
    trainer = make_vllm_trainer(
        tmp_path, peft_config=peft_config, vllm_mode="server", vllm_server_urls=[server], vllm_group_port=0
    )
    check_two_steps(trainer)
    trainer.sampler.close()
