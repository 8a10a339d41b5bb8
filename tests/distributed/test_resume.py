"""Two ranks save a PPO run whole, critic included, and go on from there as if they had never stopped.

Such a checkpoint of weights in pieces becomes a plain model by `agent-r1-trl merge`.
"""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_r1_trl.cli import main
from agent_r1_trl.critic.attach import CRITIC_FILE, attach_critic, critic_parameters, is_critic_name
from tests.distributed import resume
from tests.distributed.critics import KINDS, POLICY_FOLDER, save_policy
from tests.distributed.launch import launch
from tests.distributed.resume import NUM_STEPS, SAVED_STEP
from tests.effort import short

pytestmark = pytest.mark.release


@pytest.fixture(scope="module", params=short(["ddp", "zero3", "fsdp2"], "zero3", "fsdp2"))
def runs(request, tmp_path_factory):
    """The folder of a launch; with ZeRO-3 and FSDP2 parameters are in pieces on the ranks."""
    folder = save_policy(tmp_path_factory.mktemp(request.param))
    launch(request.param, resume.__name__, folder)
    return folder


def critic_of(run, step):
    return load_file(run / f"checkpoint-{step}" / CRITIC_FILE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_losses_of_one_that_never_stopped(runs, kind):
    assert not (runs / kind / "resumed" / f"checkpoint-{SAVED_STEP}").exists(), "it began anew"
    losses = json.loads((runs / resume.LOSSES_FILE).read_text(encoding="utf-8"))[kind]
    assert len(losses["straight"]) == NUM_STEPS
    assert len({values[0] for values in losses["straight"]}) == NUM_STEPS, "every step is another"
    for step, (expected, actual) in enumerate(zip(losses["straight"], losses["resumed"], strict=True), start=1):
        assert actual == pytest.approx(expected, abs=1e-6, rel=1e-4), step


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_critic_is_whole_and_learns_on(runs, kind):
    policy = AutoModelForCausalLM.from_pretrained(runs / POLICY_FOLDER)
    if kind == "adapter":
        policy = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    attach_critic(policy, kind)
    shapes = {name: value.shape for name, value in critic_parameters(policy).items()}
    straight, resumed = runs / kind / "straight", runs / kind / "resumed"
    saved, last = critic_of(straight, SAVED_STEP), critic_of(straight, NUM_STEPS)
    assert {name: value.shape for name, value in saved.items()} == shapes
    assert all(not torch.equal(saved[name], last[name]) for name in shapes)
    for name, value in critic_of(resumed, NUM_STEPS).items():
        torch.testing.assert_close(value, last[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_policy_is_whole_and_has_no_critic(runs, kind):
    checkpoint = runs / kind / "straight" / f"checkpoint-{NUM_STEPS}"
    (file,) = checkpoint.glob("*model.safetensors")
    weights = load_file(file)
    assert not [name for name in weights if is_critic_name(name)]
    assert all(value.numel() for value in weights.values())
    if kind != "adapter":
        plain = AutoModelForCausalLM.from_pretrained(runs / POLICY_FOLDER).state_dict()
        assert {name: value.shape for name, value in weights.items()} == {n: v.shape for n, v in plain.items()}
        assert all(not torch.equal(value, plain[name]) for name, value in weights.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_merges_into_a_plain_model(runs, kind, tmp_path):
    checkpoint = runs / kind / "straight" / f"checkpoint-{NUM_STEPS}"
    assert main(["merge", str(checkpoint), "--output_dir", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(40).reshape(2, 20)
    untrained = AutoModelForCausalLM.from_pretrained(runs / POLICY_FOLDER)
    if kind == "adapter":
        adapter = load_file(checkpoint / "adapter_model.safetensors")
        assert all(value.any() for name, value in adapter.items() if "lora_B" in name), "it was trained"
        trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(runs / POLICY_FOLDER), checkpoint)
    else:
        trained = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        logits, expected, before = (model.eval()(ids).logits for model in (merged, trained, untrained))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert (logits - before).abs().max() > 1e-3
