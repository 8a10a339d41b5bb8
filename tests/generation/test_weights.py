"""What is sent to another engine: checkpoint names, adapters merged, live weights untouched."""

import contextlib
import copy
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import MixtralConfig

from agent_r1_trl.critic.attach import attach_critic, critic_parameters
from agent_r1_trl.generation import weights
from agent_r1_trl.generation.weights import adapter_tensors, policy_weights, served_adapter, write_adapter
from tests.generation.helpers import tiny_model

ADAPTERS = {
    "lora": LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj", "embed_tokens"]),
    "dora": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True),
    "saved module": LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["lm_head"]),
}


def adapted_model(name):
    model = get_peft_model(tiny_model(), copy.deepcopy(ADAPTERS[name]))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_only_what_training_changes_is_sent_again():
    model = adapted_model("saved module")
    sent = {key for key, _ in policy_weights(model, only_trainable=True)}
    assert sent == {"lm_head.weight"} | {
        f"model.layers.{layer}.self_attn.v_proj.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }
    full = tiny_model()
    assert len(list(policy_weights(full, only_trainable=True))) == len(list(full.parameters()))


def test_a_disabled_adapter_and_a_merged_one_are_not_added():
    model = adapted_model("lora")
    name = "model.layers.0.self_attn.q_proj.weight"
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    merged = dict(policy_weights(model))[name]
    with model.disable_adapter():
        assert torch.equal(dict(policy_weights(model))[name], layer.base_layer.weight)
    model.merge_adapter()
    torch.testing.assert_close(dict(policy_weights(model))[name], merged, atol=1e-6, rtol=1e-6)


def test_syncs_of_a_bf16_policy_round_once_and_leave_its_base_bit_for_bit_alone(tmp_path):
    """Merging into the live weights and out again, step after step, would let them drift."""
    model = get_peft_model(tiny_model().bfloat16(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    for step in range(100):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.1)
        sent = dict(policy_weights(model, only_trainable=True))
        exact = layer.base_layer.weight.float() + layer.get_delta_weight("default")
        assert torch.equal(sent["model.layers.0.self_attn.q_proj.weight"], exact.bfloat16()), step
    write_adapter(model, served_adapter(model), adapter_tensors(model, "default"), tmp_path)
    present = {name.replace(".default.", "."): p for name, p in model.named_parameters() if "lora_" in name}
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert written.keys() == present.keys() and all(torch.equal(written[name], present[name]) for name in written)
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_an_adapter_is_written_as_peft_writes_it_embeddings_included(tmp_path):
    model = adapted_model("lora")
    write_adapter(model, served_adapter(model), adapter_tensors(model, "default"), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and any("lora_embedding_A" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_mixture_of_experts_has_the_names_of_its_checkpoint(tmp_path):
    model = tiny_model(MixtralConfig, num_local_experts=3)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weights = dict(policy_weights(model))
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[key], value) for key, value in stored.items())


def test_every_weight_is_read_inside_its_gather_context(monkeypatch):
    model = adapted_model("saved module")
    gathered: set[int] = set()
    seen: set[int] = set()

    @contextlib.contextmanager
    def gather(parameters):
        gathered.update(id(parameter) for parameter in parameters)
        seen.update(gathered)
        yield
        gathered.clear()

    monkeypatch.setattr(weights, "gather_for", lambda model: gather)
    for _ in policy_weights(model):
        assert gathered
    replaced = {id(p) for n, p in model.named_parameters() if "original_module" in n}
    assert seen == {id(parameter) for parameter in model.parameters()} - replaced


def test_weights_in_4_bits_are_sent_as_numbers_with_the_adapter_added(monkeypatch):
    """With a stand-in for bitsandbytes; `test_qlora.py` has the real one."""
    expected = adapted_model("lora")
    model, numbers = copy.deepcopy(expected), {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, nn.Linear) and "layers" in name and "lora_" not in name:
            numbers[module] = module.weight.data.bfloat16()
            module.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
            module.weight.__class__ = type("Params4bit", (nn.Parameter,), {})
            module.compute_dtype = torch.float32
    monkeypatch.setattr("peft.utils.integrations.dequantize_module_weight", numbers.__getitem__)
    found = dict(policy_weights(model))
    for name, value in policy_weights(expected):
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], value, atol=0.01, rtol=0)  # bfloat16 of numbers below 1


@pytest.mark.parametrize(
    ("adapter", "is_repacked", "reason"),
    [("lora", False, "quantised in another way"), ("dora", False, "not plain LoRA"), ("lora", True, "was repacked")],
)
def test_quantised_weights_that_are_no_numbers_for_another_engine_are_refused(adapter, is_repacked, reason):
    model = adapted_model(adapter)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)
    if is_repacked:
        layer.weight.__class__ = type("Params4bit", (nn.Parameter,), {})
        layer.weight.quant_state = types.SimpleNamespace(packing_format_for_cpu=True)
    with pytest.raises(ValueError, match=f"q_proj.*{reason}.*use_vllm=False"):
        dict(policy_weights(model))


@pytest.mark.parametrize("kind", ["head", "model", "adapter"])
def test_a_critic_is_never_sent(kind):
    plain = tiny_model()
    model = adapted_model("lora") if kind == "adapter" else tiny_model()
    expected = {name: value.clone() for name, value in policy_weights(model)}
    attach_critic(model, kind)
    if kind == "adapter":
        model.base_model.set_adapter(["default", "critic"])
    with torch.no_grad():
        for parameter in critic_parameters(model).values():
            parameter.normal_()
    sent = dict(policy_weights(model))
    assert sent.keys() == expected.keys() == set(plain.state_dict())
    assert all(torch.equal(value, expected[name]) for name, value in sent.items())
    assert set(dict(policy_weights(model, only_trainable=True))) <= set(expected)


def test_parameters_in_one_buffer_as_zero_2_holds_them_are_all_sent():
    model = tiny_model()
    expected = {name: value.clone() for name, value in policy_weights(model)}
    buffer = torch.cat([parameter.data.flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        end = start + parameter.numel()
        parameter.data = buffer[start:end].view_as(parameter)
        start = end
    sent = dict(policy_weights(model))
    assert sent.keys() == expected.keys() and "lm_head.weight" in sent
    assert all(torch.equal(sent[name], expected[name]) for name in sent)
