"""The critic's gradients are those of two separate models, whatever checkpointing, adapters or reference passes do."""

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from agent_r1_trl.critic import attach as critic_adapter
from agent_r1_trl.critic.attach import (
    CRITIC_FILE,
    _module_of,
    attach_critic,
    base_causal_lm,
    critic_parameters,
    enable_critic_gradients,
    load_critic,
    save_critic,
    set_detached,
    use_critic_adapter,
)
from tests.test_critic_adapters import IDS, make_base

KINDS = ("adapter", "head", "model")


def make_policy(*, lora=True):
    """A tiny Qwen2 with TRL's fused head and, for LoRA, an adapter."""
    model = make_base()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    return model


def make_actor_critic(kind, *, lora=True):
    model = make_policy(lora=lora)
    attach_critic(model, kind)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ("lora" in name or "value_head" in name):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def losses(model):
    mask = torch.ones_like(IDS)
    output = model(input_ids=IDS, attention_mask=mask, labels=IDS, fused_lm_head=True, compute_values=True)
    return -output.log_probs.mean(), (output.state_values**2 - output.state_values).mean()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(left, right, tolerance=1e-6):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [True, False])
def test_values_leave_log_probs_as_they_were(kind, lora):
    if kind == "adapter" and not lora:
        return
    plain, both = make_policy(lora=lora), make_actor_critic(kind, lora=lora)
    if lora:
        both_lora = {n: p for n, p in both.named_parameters() if ".default." in n}
        plain.load_state_dict({n: p.data for n, p in both_lora.items()}, strict=False)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS, "fused_lm_head": True}
    expected = plain.train()(**inputs)
    output = both(**inputs, compute_values=True)
    torch.testing.assert_close(output.log_probs, expected.log_probs, rtol=0, atol=5e-7)
    assert output.state_values.shape == IDS.shape
    values_only = both(input_ids=IDS, attention_mask=torch.ones_like(IDS), values_only=True).state_values
    torch.testing.assert_close(values_only, output.state_values)


def test_the_adapter_critic_is_the_model_with_the_critics_adapter():
    model = make_actor_critic("adapter")
    base = base_causal_lm(model)
    with use_critic_adapter(base):
        hidden = base.base_model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state
    values = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), values_only=True).state_values
    torch.testing.assert_close(values, base.value_head(hidden))
    policy_hidden = base.base_model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state
    assert (policy_hidden - hidden).abs().max() > 1e-3


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_no_gradient(kind, use_reentrant):
    model = make_actor_critic(kind)
    plain = gradients(model, sum(losses(model)))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same(gradients(model, sum(losses(model))), plain)
    # TRL switches checkpointing off and on again around every scoring pass.
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same(gradients(model, sum(losses(model))), plain)


class Layer(torch.nn.Module):
    def forward(self, hidden):
        return hidden


def test_the_layer_is_found_in_what_transformers_checkpoints():
    """Up to transformers 5.22 a bound method, then the function with the layer as its first argument."""
    layer = Layer()
    blocks = (
        layer.__call__,
        layer.forward,
        partial(layer.__call__, cache=None),
        partial(Layer.forward, layer, cache=None),
    )
    assert all(_module_of(block) is layer for block in blocks)
    assert _module_of(lambda hidden: layer(hidden)) is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_a_block_whose_layer_is_not_known_changes_no_gradient(monkeypatch, use_reentrant):
    monkeypatch.setattr(critic_adapter, "_module_of", lambda block: None)
    test_checkpointing_changes_no_gradient("adapter", use_reentrant)


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_one_backward_equals_two_separate_ones(kind):
    model = make_actor_critic(kind)
    together = gradients(model, sum(losses(model)))
    policy, value = gradients(model, losses(model)[0]), gradients(model, losses(model)[1])
    critic_names = set(critic_parameters(model))
    assert {name for name, gradient in policy.items() if gradient.abs().sum() > 0}.isdisjoint(critic_names)
    assert {name for name, gradient in value.items() if gradient.abs().sum() > 0} <= critic_names
    for name, gradient in together.items():
        source = value if name in critic_names else policy
        torch.testing.assert_close(gradient, source[name], rtol=1e-5, atol=1e-7)


def test_the_head_critic_trains_the_policys_hidden_states_unless_detached():
    model = make_actor_critic("head")
    attached = gradients(model, losses(model)[1])
    assert any("lora" in name and gradient.abs().sum() > 0 for name, gradient in attached.items())
    set_detached(model, True)
    detached = gradients(model, losses(model)[1])
    assert {name for name, gradient in detached.items() if gradient.abs().sum() > 0} <= set(critic_parameters(model))


def test_a_reference_pass_freezes_the_critic_until_its_gradients_are_enabled_again():
    model = make_actor_critic("adapter")
    with model.disable_adapter(), torch.no_grad():
        model(input_ids=IDS)
    enable_critic_gradients(model)
    assert all(parameter.requires_grad for parameter in critic_parameters(model).values())
    assert any(".default." in name and parameter.requires_grad for name, parameter in model.named_parameters())


def test_attaching_keeps_what_was_trainable_and_adds_the_critic():
    for kind in KINDS:
        before = {name for name, p in make_policy().named_parameters() if p.requires_grad}
        model = make_policy()
        attach_critic(model, kind)
        after = {name for name, p in model.named_parameters() if p.requires_grad}
        assert after == before | set(critic_parameters(model)), kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_is_saved_apart_and_the_policy_alone_loads(kind, tmp_path):
    model = make_actor_critic(kind)
    model.save_pretrained(tmp_path)
    save_critic(model, tmp_path)
    assert (tmp_path / CRITIC_FILE).exists()
    saved = {path.name for path in tmp_path.rglob("*.safetensors")}
    assert saved == {"adapter_model.safetensors", "critic.safetensors"}
    fresh = make_actor_critic(kind)
    for parameter in critic_parameters(fresh).values():
        torch.nn.init.zeros_(parameter)
    load_critic(fresh, tmp_path)
    for name, parameter in critic_parameters(fresh).items():
        torch.testing.assert_close(parameter, critic_parameters(model)[name])


def test_a_full_model_is_saved_without_its_critic(tmp_path):
    model = make_actor_critic("model", lora=False)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    torch.testing.assert_close(loaded(IDS).logits, copy.deepcopy(model).eval()(IDS).logits, rtol=0, atol=1e-6)


def test_loading_the_wrong_critic_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="critic"):
        load_critic(make_actor_critic("head"), tmp_path)
    save_critic(make_actor_critic("head"), tmp_path)
    with pytest.raises(ValueError, match="critic="):
        load_critic(make_actor_critic("adapter"), tmp_path)


def test_wrong_kinds_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="critic='mlp'"):
        attach_critic(make_policy(), "mlp")
    with pytest.raises(ValueError, match="peft_config="):
        attach_critic(make_policy(lora=False), "adapter")
