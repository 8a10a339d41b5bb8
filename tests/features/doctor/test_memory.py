"""The memory estimate agrees with real tensors of tiny models, and with sums done by hand.

Covered: parameters, LoRA, gradients, Adam's states, critics, saved activations, attention masks, the KV cache; by
hand what ZeRO divides, quantised weights and vLLM. Not covered: a GPU's allocator, DeepSpeed's buffers in use.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config

from agent_r1_trl.critic import attach_critic, critic_parameters
from agent_r1_trl.features.doctor.memory import (
    GIB,
    MemorySetup,
    ModelShape,
    estimate_memory,
    find_savings,
    read_shape,
    row_bounds,
    token_bytes,
)
from agent_r1_trl.generation.local.kv_cache import RowCache
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.update.micro_batches import plan_passes
from agent_r1_trl.update.packed_attention import use_packed_attention
from agent_r1_trl.update.packing import pack
from tests.toys import limits_of

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
ROWS, TOKENS = 4, 96


def config_of(kind=Qwen2Config, num_layers=3, **changes):
    return kind(**SIZES | {"num_hidden_layers": num_layers, "tie_word_embeddings": False} | changes)


def real_model(config, *, peft_config=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    return get_peft_model(model, copy.deepcopy(peft_config)) if peft_config else model


def num_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def estimated(name, shape, **setup) -> float:
    found = [line.bytes for line in estimate_memory(shape, MemorySetup(**setup)).lines if line.name == name]
    assert len(found) == 1, f"{len(found)} lines called {name}"
    return found[0]


def layer_bytes(shape, setup) -> float:
    return setup.pass_tokens() * token_bytes(shape, setup)


def train_one_step(model) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(input_ids=torch.arange(10)[None]).logits.float().square().mean().backward()
    optimizer.step()
    return optimizer


def adam_bytes(optimizer) -> int:
    states = optimizer.state.values()
    return num_bytes(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))


# ---------------------------------------------------------------- what is trained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_gradients_and_adam_are_those_of_a_real_step(dtype, tied):
    config = config_of(tie_word_embeddings=tied)
    model = real_model(config, dtype=getattr(torch, dtype))
    shape = read_shape(config)
    optimizer = train_one_step(model)
    assert estimated("weights", shape, dtype=dtype) == num_bytes(model.parameters())
    gradients = num_bytes(parameter.grad for parameter in model.parameters())
    assert estimated("policy: gradients", shape, dtype=dtype) == gradients
    assert estimated("policy: Adam", shape, dtype=dtype) == adam_bytes(optimizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "peft_config",
    [
        LORA,
        LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        LoraConfig(r=2, target_modules=["down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    ],
    ids=["all linear layers", "two projections", "with a whole module"],
)
def test_the_adapter_is_what_peft_makes_of_it(dtype, peft_config):
    model = real_model(config_of(), peft_config=peft_config, dtype=getattr(torch, dtype))
    shape = read_shape(config_of(), copy.deepcopy(peft_config))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    optimizer = train_one_step(model)
    total = dict.fromkeys(("adapter", "weights", "gradients", "Adam"), 0.0)
    for line in estimate_memory(shape, MemorySetup(dtype=dtype)).lines:
        who, _, what = line.name.partition(": ")
        if who in ("policy", "whole modules"):
            total[what] += line.bytes
    assert total["adapter"] + total["weights"] == num_bytes(trained)
    assert total["gradients"] == num_bytes(item.grad for item in trained)
    assert total["Adam"] == adam_bytes(optimizer)
    assert estimated("weights", shape, dtype=dtype) == num_bytes(frozen)


@pytest.mark.parametrize(("kind", "line"), [("head", "head"), ("adapter", "adapter, head"), ("model", "model, head")])
def test_a_critic_weighs_what_the_trainer_attaches(kind, line):
    model = real_model(config_of(), peft_config=LORA)
    shape = read_shape(config_of(), copy.deepcopy(LORA))
    attach_critic(model, kind)
    assert estimated(f"critic: {line}", shape, critic=kind) == num_bytes(critic_parameters(model).values())


def test_reading_a_shape_allocates_no_weight():
    """Seventy billion parameters in float32 would be 280 GB."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    assert read_shape(config).num_parameters == 70_553_706_496


# ---------------------------------------------------------------- activations and cache


def saved_bytes(model, *, autocast=False) -> int:
    """Bytes of distinct tensors that autograd keeps for the backward, parameters apart."""
    ours = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage
        return tensor

    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[0, :9] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model(input_ids=torch.zeros(ROWS, TOKENS, dtype=torch.long), attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def setup_of(**changes) -> MemorySetup:
    sizes = {"micro_batch": ROWS, "prompt_tokens": TOKENS // 2, "completion_tokens": TOKENS // 2}
    return MemorySetup(**sizes | {"gradient_checkpointing": False} | changes)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_saves_what_autograd_says_it_saves(kind, dtype):
    few, many = (real_model(config_of(kind, n), dtype=getattr(torch, dtype)).base_model.train() for n in (2, 4))
    real = (saved_bytes(many) - saved_bytes(few)) / 2
    assert layer_bytes(read_shape(config_of(kind)), setup_of(dtype=dtype)) == pytest.approx(real, rel=0.08)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_under_autocast_a_layer_saves_16_bit_copies_of_its_weights_too(kind):
    few, many = (real_model(config_of(kind, n)).base_model.train() for n in (2, 4))
    real = (saved_bytes(many, autocast=True) - saved_bytes(few, autocast=True)) / 2
    shape = read_shape(config_of(kind, 2))
    copies = 2 * shape.num_linear_parameters / shape.num_layers
    assert layer_bytes(shape, setup_of(mixed_precision=True)) + copies == pytest.approx(real, rel=0.1)
    assert estimated("autocast", shape, mixed_precision=True, gradient_checkpointing=False) == 2 * (
        shape.num_linear_parameters + 64 * 128
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_saves_the_inputs_of_its_adapters_and_none_of_frozen_layers(dtype):
    lora = LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    real = []
    for num_layers in (2, 4):
        model = real_model(config_of(num_layers=num_layers), peft_config=lora, dtype=getattr(torch, dtype)).train()
        real.append(saved_bytes(model.base_model.model.model))
    shape = read_shape(config_of(), copy.deepcopy(lora))
    # A CPU keeps dropout's mask in the input's type (float32), a GPU and the estimate in one byte.
    masks = ROWS * TOKENS * shape.num_adapter_inputs / shape.num_layers * 3
    estimate = layer_bytes(shape, setup_of(dtype=dtype))
    assert estimate + masks == pytest.approx((real[1] - real[0]) / 2, rel=0.05)


def test_checkpointing_keeps_one_vector_per_layer():
    few, many = (real_model(config_of(num_layers=n)).base_model.train() for n in (2, 6))
    for model in (few, many):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    real = (saved_bytes(many) - saved_bytes(few)) / 4
    assert real == ROWS * TOKENS * 128 * 4
    sizes = vars(setup_of(gradient_checkpointing=True))
    few, many = (estimated("activations", read_shape(config_of(num_layers=n)), **sizes) for n in (2, 6))
    assert many - few == pytest.approx(4 * real)


def test_the_cache_of_the_rollout_holds_spare_columns():
    """Buffers of rows that grow token by token, against the estimate for trajectories of each length."""
    prefilled, cache, shape, shares = DynamicCache(), RowCache(), read_shape(config_of()), []
    with torch.no_grad():
        real_model(config_of())(input_ids=torch.zeros(ROWS, 32, dtype=torch.long), past_key_values=prefilled)
    cache.add_rows(prefilled, torch.ones(ROWS, 32, dtype=torch.long), list(range(ROWS)))
    for length in range(33, 1000):
        cache.open_column()
        cache.close_column()
        real = num_bytes(tensor for layer in cache.layers for tensor in layer.tensors())
        sizes = {"prompt_tokens": 32, "completion_tokens": length - 32, "rollout_rows": ROWS}
        shares += [real / estimated("KV cache", shape, **sizes)]
    assert 0.99 < max(shares) <= 1


@pytest.mark.parametrize("critic", [None, "model"])
def test_rows_behind_a_shared_prefix_keep_a_mask_for_each_length(critic):
    """Eight rows of 13 to 20 tokens behind a prompt of 40, all of them scored."""
    model = real_model(config_of())
    use_packed_attention(model.base_model, share_prefixes=True)
    ids, mask = torch.zeros(8, 60, dtype=torch.long), torch.ones(8, 60, dtype=torch.long)
    ids[:, 40] = torch.arange(8)
    for row in range(8):
        mask[row, 53 + row :] = 0
    batch = pack(ids, mask, mask[:, 40:].bool(), share_prefixes=True)
    model.base_model(**batch.inputs)
    real = sum(one.untyped_storage().nbytes() for one in batch.layout._masks.values()) * (2 if critic else 1)
    sizes = {"micro_batch": 8, "prompt_tokens": 40, "completion_tokens": 20, "critic": critic}
    estimate = estimated("attention masks", read_shape(config_of()), update_layout="shared", **sizes)
    assert 0.6 * estimate <= real <= estimate
    for other in ({"update_layout": "packed"}, {"update_layout": "shared", "has_attention_masks": False}):
        lines = estimate_memory(read_shape(config_of()), MemorySetup(**sizes, **other)).lines
        assert all(line.name != "attention masks" for line in lines)


# ---------------------------------------------------------------- by hand

BILLION = ModelShape(
    num_parameters=10**9,
    num_linear_parameters=8 * 10**8,
    num_head_parameters=10**8,
    num_layers=10,
    hidden_size=1000,
    intermediate_size=3000,
    num_heads=10,
    num_kv_heads=2,
    head_dim=100,
    vocab_size=100_000,
)
LORA_BILLION = ModelShape(**vars(BILLION) | {"num_adapter_parameters": 10**7})


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "states"), [(0, 4, 4, 8), (1, 2, 2, 3), (2, 2, 0.5, 3), (3, 0.5, 0.5, 3)]
)
def test_each_zero_stage_divides_what_its_paper_says(stage, weights, gradients, states):
    """Bytes per parameter on each of 4 GPUs in mixed precision: 2 + 2 + 12, the 12 always over 4 = 3."""
    setup = {"zero_stage": stage, "num_processes": 4, "mixed_precision": True}
    assert estimated("weights", BILLION, **setup) == weights * 10**9
    assert estimated("policy: gradients", BILLION, **setup) == gradients * 10**9
    assert estimated("policy: Adam", BILLION, **setup) == states * 10**9


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (0, {"DDP buckets"}),
        (2, {"ZeRO buffer"}),
        (3, {"ZeRO buffer", "ZeRO-3 gathered", "ZeRO-3 gathered to generate"}),
    ],
)
def test_processes_that_talk_keep_buffers(stage, names):
    def communication(**setup):
        lines = estimate_memory(BILLION, MemorySetup(zero_stage=stage, **setup)).lines
        return {line.name for line in lines if line.name.startswith(("DDP", "ZeRO"))}

    assert communication(num_processes=2) == names
    assert communication(num_processes=1) == set()


def test_vllm_does_not_gather_the_model():
    lines = estimate_memory(BILLION, MemorySetup(zero_stage=3, num_processes=4, generator="vllm")).lines
    assert all("generate" not in line.name for line in lines)


def test_data_parallel_keeps_every_gradient_twice():
    setup = {"num_processes": 2, "critic": "model"}
    gradients = sum(estimated(f"{who}: gradients", BILLION, **setup) for who in ("policy", "critic"))
    assert estimated("DDP buckets", BILLION, **setup) == gradients


def test_offloading_moves_bytes_to_main_memory_and_loses_none():
    common = {"zero_stage": 3, "num_processes": 4, "mixed_precision": True}
    here = estimate_memory(BILLION, MemorySetup(**common))
    there = estimate_memory(BILLION, MemorySetup(**common, offload_optimizer=True, offload_parameters=True))
    assert (here.host, there.host) == (0, (0.5 + 0.5 + 3) * 10**9)
    assert sum(line.bytes for line in here.lines) == sum(line.bytes for line in there.lines)
    assert there.peak < here.peak


@pytest.mark.parametrize(
    ("quantization", "nested", "per_weight"),
    [("4bit", False, 0.5625), ("4bit", True, 0.515869140625), ("8bit", False, 1.0)],
)
def test_a_quantised_base_keeps_its_linear_layers_in_few_bits(quantization, nested, per_weight):
    """4 bits, and per 64 weights a scale of 4 bytes; nested: of 1 byte, and 4 bytes per 256 of those."""
    setup = {"quantization": quantization, "nested_quantization": nested, "dtype": "bfloat16"}
    assert estimated("weights", LORA_BILLION, **setup) == per_weight * 8 * 10**8 + 2 * 2 * 10**8


QLORA = {"quantization": "4bit", "dtype": "bfloat16"}
ZERO_3 = {"zero_stage": 3, "num_processes": 4, "mixed_precision": True}


@pytest.mark.parametrize(
    ("name", "shape", "setup", "expected"),
    [
        ("policy: adapter", LORA_BILLION, QLORA, 2 * 10**7),  # in bfloat16
        ("policy: Adam", LORA_BILLION, QLORA, 4 * 10**7),
        ("policy: Adam", BILLION, {"optimizer_bytes": 2}, 2 * 10**9),
        ("reference model", BILLION, {"reference_model": True}, 4 * 10**9),
        ("ZeRO-3 gathered to generate", BILLION, ZERO_3, 2 * 10**9),
    ],
)
def test_a_line_is_what_is_counted_by_hand(name, shape, setup, expected):
    assert estimated(name, shape, **setup) == expected


def test_lora_needs_no_reference_model():
    lines = estimate_memory(LORA_BILLION, MemorySetup(reference_model=True)).lines
    assert all(line.name != "reference model" for line in lines)


def test_a_critic_with_its_own_graph_doubles_the_activations():
    plain = estimated("activations", BILLION)
    assert estimated("activations", BILLION, critic="head") == plain
    assert estimated("activations", BILLION, critic="model") == 2 * plain


def test_what_only_the_critic_reads_lengthens_its_own_rows():
    plain = estimated("activations", BILLION, micro_batch=2, critic="model")
    more = estimated("activations", BILLION, micro_batch=2, critic="model", critic_prefix=64)
    assert more / plain == pytest.approx((1024 + 1024 + 64) / 2048)
    assert estimated("activations", BILLION, critic="head", critic_prefix=64) == estimated("activations", BILLION)


# ---------------------------------------------------------------- rows and passes


@pytest.mark.parametrize("prefix", [0, 10])
def test_a_pass_by_tokens_holds_what_the_update_puts_into_it(prefix):
    """The largest pass of a real plan, with rows of all lengths up to the longest."""
    generator = torch.Generator().manual_seed(0)
    sizes = [prefix + 100, *(prefix + torch.randint(20, 101, (63,), generator=generator)).tolist()]
    for limit, rows, most in ((300, 64, 300), (60, 64, 100 + prefix), (10_000, 64, 10_000), (10_000, 3, 3 * 100)):
        setup = MemorySetup(
            **{"prompt_tokens": 20, "completion_tokens": 80, "micro_batch": 8, "update_layout": "packed"},
            max_tokens_per_micro_batch=limit, update_rows=rows, critic_prefix=prefix,
        )  # fmt: skip
        ((*passes,),) = plan_passes(sizes[:rows], 1, limit)
        largest = max(sum(sizes[row] for row in chosen) for chosen in passes)
        assert largest <= setup.pass_tokens(prefix) <= most + (3 * prefix if rows == 3 else 0)
        assert setup.pass_tokens() <= setup.pass_tokens(prefix)


def test_packed_rows_save_no_mask_and_no_padding():
    sizes = {"micro_batch": 4, "prompt_tokens": 300, "completion_tokens": 300, "row_tokens": 400}
    padded = MemorySetup(**sizes, has_attention_masks=False)
    packed = MemorySetup(**sizes, update_layout="packed")
    ratio = layer_bytes(BILLION, packed) / layer_bytes(BILLION, padded)
    assert ratio == pytest.approx(400 / 600)


def play(limits, prompt, turns):
    """Rows as (opening, tokens), by the policy's definition, of turns (sampled, observation)."""
    rows, context, opening, done, cut = [], prompt, prompt, 0, True
    for number, (sampled, observation) in enumerate(turns):
        if done + sampled > limits.max_completion_length:
            break
        row = (opening, context + sampled)
        rows = [*rows, row] if cut else [*rows[:-1], row]
        done += sampled + observation
        context += sampled + observation
        kept = turns[max(0, number + 1 - (limits.context.turns or 1)) : number + 1]
        cut = limits.context.policy == "step" or (number + 1 > len(kept) and context > (limits.context.tokens or 0))
        if cut:
            context = opening = prompt + sum(map(sum, kept))
    return rows


@pytest.mark.parametrize(("policy", "tokens"), [("window", None), ("window", 500), ("window", 90), ("step", None)])
@pytest.mark.parametrize("max_turns", [4, 30])
def test_no_row_of_a_played_trajectory_is_longer_than_its_bound(policy, tokens, max_turns):
    limits = RolloutLimits(
        context={"policy": policy, "turns": 3, "tokens": tokens}, max_turns=max_turns,
        max_completion_length=1500, max_tokens_per_turn=40, max_observation_tokens=25,
    )  # fmt: skip
    bounds, draw = row_bounds(limits, 60), random.Random(0)
    trials = [[(40, 25)] * max_turns, [(40, 10)] * max_turns]  # the longest turns, and the most
    trials += [[(draw.randint(1, 40), draw.randint(0, 25)) for _ in range(max_turns)] for _ in range(60)]
    played = [play(limits, 60, turns) for turns in trials]
    assert max(opening for rows in played for opening, _ in rows) <= bounds["prompt_tokens"]
    assert max(end - opening for rows in played for opening, end in rows) <= bounds["completion_tokens"]
    longest = max(end for rows in played for _, end in rows)
    assert longest <= bounds["row_tokens"] <= longest + 65  # a turn at most: the bound is not idle
    most = max(map(len, played[:2]))
    assert most <= bounds["rows_per_trajectory"] <= most + 1


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"context.policy": "window", "context.turns": 4}, 20),
        ({"context.policy": "window", "context.turns": 4, "context.tokens": 3000}, 3),
        ({"context.policy": "drop_observations", "context.turns": 4}, 20),
        ({"context.policy": "summarise", "context.tokens": 3000, "context.summary_tokens": 300}, 3),
        ({"context.policy": "step"}, 24),
        ({}, 1),
    ],
)
def test_the_rows_of_24_turns_are_those_that_a_rollout_made(changes, rows):
    """The conversation of benchmarks/context_policies.py: 24 turns of 240 tokens, and what it counted."""
    limits = limits_of(
        max_turns=24, max_completion_length=24 * 240, max_tokens_per_turn=40, max_observation_tokens=200, **changes
    )
    assert row_bounds(limits, 500)["rows_per_trajectory"] == rows


@pytest.mark.parametrize("policy", ["strip_thinking", lambda view: view.messages])
def test_a_policy_whose_rows_nobody_can_foresee_counts_as_one_row_of_full_length(policy):
    bounds = row_bounds(RolloutLimits(context={"policy": policy}, max_completion_length=900), 100)
    assert (bounds["prompt_tokens"], bounds["row_tokens"], bounds["rows_per_trajectory"]) == (1000, 1000, 1)


def test_vllm_takes_its_share_always_asleep_during_the_update_or_not_at_all():
    def vllm(**setup):
        lines = estimate_memory(BILLION, MemorySetup(gpu_memory_gb=80, vllm_share=0.5, **setup)).lines
        (line,) = (line for line in lines if line.name == "vLLM")
        return line.phase, line.bytes

    assert vllm(generator="vllm") == ("always", 40 * GIB)
    assert vllm(generator="vllm", vllm_sleeps=True) == ("rollout", 40 * GIB)
    assert vllm(generator="server") == ("rollout", 0)


def test_the_peak_takes_the_larger_of_update_and_rollout():
    estimate = estimate_memory(BILLION, MemorySetup(generator="vllm", vllm_sleeps=True, vllm_share=0.9))
    assert estimate.total("rollout") > estimate.total("update")
    assert estimate.peak == estimate.total("always") + estimate.total("rollout")


@pytest.mark.parametrize(("gpu", "verdict"), [(21, "fits"), (20, "tight"), (18, "does not fit")])
def test_the_verdict_compares_the_peak_with_the_gpu(gpu, verdict):
    estimate = estimate_memory(BILLION, MemorySetup(gpu_memory_gb=gpu, completion_tokens=5632, generator="server"))
    assert estimate.verdict == verdict, estimate.peak / GIB


def test_a_share_of_vllm_that_cannot_hold_its_weights_does_not_fit():
    """Two bytes for each of 10^9 parameters are 1.86 GiB."""
    setup = {"generator": "vllm", "gpu_memory_gb": 1000}
    assert estimate_memory(BILLION, MemorySetup(**setup, vllm_share=0.0018)).verdict == "does not fit"
    assert estimate_memory(BILLION, MemorySetup(**setup, vllm_share=0.0019)).verdict == "fits"


def test_savings_are_real_and_sorted():
    setup = MemorySetup(num_processes=4, gradient_checkpointing=False, micro_batch=8, critic="model")
    savings = find_savings(BILLION, setup)
    peaks = [saving.peak for saving in savings]
    assert peaks == sorted(peaks)
    assert max(peaks) < estimate_memory(BILLION, setup).peak
    changes = " ".join(saving.change for saving in savings)
    words = ("zero3", "gradient_checkpointing", "critic: head", "8bit", "max_tokens_per_micro_batch: 1024")
    assert all(word in changes for word in words)
    changes = [saving.change for saving in find_savings(LORA_BILLION, MemorySetup())]
    assert "load_in_4bit: true" in changes and "dtype: bfloat16 (of the frozen base)" in changes


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int8"},
        {"generator": "tgi"},
        {"critic": "heads"},
        {"num_processes": 0},
        {"gpu_memory_gb": 0},
        {"critic": "adapter"},
        {"max_tokens_per_micro_batch": 2048},
        {"quantization": "4bit"},
    ],
)
def test_a_run_that_cannot_be_is_refused(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match="load_in_4bit=True" if name == "quantization" else f"{name}={value!r}"):
        estimate_memory(BILLION, MemorySetup(**changes))
