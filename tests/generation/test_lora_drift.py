"""A thousand weight syncs leave the frozen base weights of a bf16 policy bit for bit what they were."""

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from agent_r1_trl.generation.adapters import adapter_tensors, served_adapter, write_adapter
from agent_r1_trl.generation.weights import policy_weights
from tests.generation.helpers import tiny_model

NUM_SYNCS = 1000
RANK, ALPHA = 4, 16
TARGETS = ("q_proj", "down_proj")


def bf16_policy():
    """A bf16 model with float32 LoRA adapters, as the trainers make it."""
    model = tiny_model().to(torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS)))


def base_bits(model):
    """Copies of everything that training leaves alone, as integers: NaN and -0.0 count too."""
    return {name: p.detach().clone().view(torch.int16) for name, p in model.named_parameters() if not p.requires_grad}


def trained(num_steps):
    """The policy after each of so many stand-ins for an optimizer step, beside its base weights before the first."""
    model = bf16_policy()
    original = base_bits(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        yield model, original


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def expected_weights(model, original):
    """Checkpoint name to base + alpha / r * B A, worked out from the base weights before the first sync."""
    state = model.state_dict()
    expected = {}
    for name in state:
        if "lora_A" in name:
            layer = name.removesuffix(".lora_A.default.weight")
            delta = ALPHA / RANK * (state[f"{layer}.lora_B.default.weight"] @ state[name])
            base = original[f"{layer}.base_layer.weight"].view(torch.bfloat16).float()
            expected[f"{layer.removeprefix('base_model.model.')}.weight"] = base + delta
    return expected


def test_a_thousand_syncs_of_merged_weights_leave_the_base_alone():
    for model, original in trained(NUM_SYNCS):
        sent = dict(policy_weights(model, only_trainable=True))
        expected = expected_weights(model, original)
        assert len(expected) == 2 * len(TARGETS)
        for name, value in expected.items():
            assert sent[name].dtype == torch.bfloat16
            # Rounded once, to 8 bits; float32 sums in another order may fall on the other side of a tie.
            torch.testing.assert_close(sent[name].float(), value, rtol=2**-8, atol=1e-6)
        assert same(base_bits(model), original)


def test_a_thousand_merges_in_place_would_not():
    for model, original in trained(NUM_SYNCS):
        model.merge_adapter()
        model.unmerge_adapter()
        has_drifted = not same(base_bits(model), original)
    assert has_drifted


def test_written_adapters_hold_the_present_tensors_and_leave_the_base_alone(tmp_path):
    for sync, (model, original) in enumerate(trained(5)):
        adapter = served_adapter(model)
        write_adapter(model, adapter, adapter_tensors(model, adapter), tmp_path / str(sync))
        written = load_file(tmp_path / str(sync) / "adapter_model.safetensors")
        present = {name.replace(".default.", "."): p for name, p in model.named_parameters() if "lora_" in name}
        assert len(written) == 2 * 2 * len(TARGETS)
        assert same(written, present)
        assert same(base_bits(model), original)
    sent_first, sent_last = (load_file(tmp_path / sync / "adapter_model.safetensors") for sync in ("0", "4"))
    assert not same(sent_first, sent_last)
