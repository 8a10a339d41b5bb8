"""The memory estimate agrees with real tensors of tiny models, and with sums done by hand.

Covered: parameters, LoRA, gradients, Adam's states, critics, saved activations, shared prefixes, the KV cache; by
hand what ZeRO divides, quantised weights and vLLM. Not covered: a GPU's allocator, DeepSpeed's buffers in use.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config

from agent_r1_trl.critic.attach import attach_critic, critic_parameters
from agent_r1_trl.generation.local.decoding import RowCache
from agent_r1_trl.trainers.memory import (
    ENOUGH_TOKENS,
    GIB,
    LEAST_TOKENS,
    MOST_TOKENS,
    TIGHT,
    MemorySetup,
    ModelShape,
    estimate_memory,
    find_peak,
    find_token_limit,
    is_checkpointing_needless,
    judge,
    read_shape,
    shape_of,
    token_bytes,
)
from agent_r1_trl.update.micro_batches import plan_micro_batches
from agent_r1_trl.update.packed_attention import use_packed_attention
from agent_r1_trl.update.packing import pack
from tests.fake_kernels import in_one_call

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


def lines_of(shape, **setup) -> dict[str, float]:
    """Line -> bytes; the numbers that some names hold are left out."""
    lines = estimate_memory(MemorySetup(shape=shape, **setup))
    return {line.name.partition(" of ")[0]: line.bytes for line in lines}


def layer_bytes(setup) -> float:
    return setup.micro_batch_tokens * token_bytes(setup)


def train_one_step(model) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(input_ids=torch.arange(10)[None]).logits.float().square().mean().backward()
    optimizer.step()
    return optimizer


# ---------------------------------------------------------------- what is trained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("peft_config", [None, LORA], ids=["whole", "adapter"])
def test_weights_gradients_and_adam_are_those_of_a_real_step(dtype, tied, peft_config):
    config = config_of(tie_word_embeddings=tied)
    model = real_model(config, peft_config=peft_config, dtype=getattr(torch, dtype))
    optimizer = train_one_step(model)
    lines = lines_of(read_shape(config, copy.deepcopy(peft_config)), dtype=dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert lines["weights"] == num_bytes(frozen if peft_config else trained)
    assert lines.get("policy: adapter", 0) == num_bytes(trained if peft_config else [])
    assert lines["policy: gradients"] == num_bytes(item.grad for item in trained)
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert lines["policy: Adam"] == num_bytes(states)


def test_whole_modules_beside_an_adapter_are_counted_with_it():
    lora = LoraConfig(r=2, target_modules=["down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    trained = [item for item in real_model(config_of(), peft_config=lora).parameters() if item.requires_grad]
    assert lines_of(read_shape(config_of(), lora))["policy: adapter"] == num_bytes(trained)


@pytest.mark.parametrize(("kind", "line"), [("head", "head"), ("adapter", "adapter, head"), ("model", "model, head")])
def test_a_critic_weighs_what_the_trainer_attaches(kind, line):
    model = real_model(config_of(), peft_config=LORA)
    shape = read_shape(config_of(), copy.deepcopy(LORA))
    attach_critic(model, kind)
    assert lines_of(shape, critic=kind)[f"critic: {line}"] == num_bytes(critic_parameters(model).values())


def test_reading_a_shape_allocates_no_weight():
    """Seventy billion parameters in float32 would be 280 GB."""
    sizes = {"vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
    config = LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8)
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


def setup_of(shape, **changes) -> MemorySetup:
    sizes = {"per_device_train_batch_size": ROWS, "prompt_tokens": TOKENS // 2, "max_completion_length": TOKENS // 2}
    return MemorySetup(shape=shape, **sizes | {"gradient_checkpointing": False} | changes)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_a_layer_saves_what_autograd_says_it_saves(kind, dtype):
    """Under autocast 16-bit copies of its weights, too."""
    stored, is_mixed = ("float32", True) if dtype == "autocast" else (dtype, False)
    few, many = (real_model(config_of(kind, n), dtype=getattr(torch, stored)).base_model.train() for n in (2, 4))
    real = (saved_bytes(many, autocast=is_mixed) - saved_bytes(few, autocast=is_mixed)) / 2
    setup = setup_of(shape := read_shape(config_of(kind, 2)), dtype=stored, mixed_precision=is_mixed)
    copies = 2 * shape.num_linear_parameters / shape.num_layers if is_mixed else 0
    assert layer_bytes(setup) + copies == pytest.approx(real, rel=0.1)
    found = {line.name.partition(":")[0]: line.bytes for line in estimate_memory(setup)}
    assert found.get("autocast", 0) == is_mixed * 2 * (shape.num_linear_parameters + 64 * 128)


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
    estimate = layer_bytes(setup_of(shape, dtype=dtype))
    assert estimate + masks == pytest.approx((real[1] - real[0]) / 2, rel=0.05)


def test_checkpointing_keeps_one_vector_per_layer():
    few, many = (real_model(config_of(num_layers=n)).base_model.train() for n in (2, 6))
    for model in (few, many):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    real = (saved_bytes(many) - saved_bytes(few)) / 4
    assert real == ROWS * TOKENS * 128 * 4
    shapes = (read_shape(config_of(num_layers=n)) for n in (2, 6))
    sizes = {"per_device_train_batch_size": ROWS, "prompt_tokens": 1, "max_completion_length": TOKENS - 1}
    few, many = (lines_of(shape, **sizes)["activations"] for shape in shapes)
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
        sizes = {"prompt_tokens": 32, "max_completion_length": length - 32, "generation_batch_rows": ROWS}
        shares += [real / lines_of(shape, **sizes)["KV cache"]]
    assert 0.99 < max(shares) <= 1


@pytest.mark.parametrize("critic", [None, "model"])
def test_rows_behind_a_shared_prefix_keep_its_keys_and_values(critic, monkeypatch):
    """Eight rows of 13 to 20 tokens behind a prompt of 40, all of them scored."""
    model = real_model(config_of())
    use_packed_attention(model.base_model, share_prefixes=True)
    ids, mask = torch.zeros(8, 60, dtype=torch.long), torch.ones(8, 60, dtype=torch.long)
    ids[:, 40] = torch.arange(8)
    for row in range(8):
        mask[row, 53 + row :] = 0
    with in_one_call(monkeypatch, "flash"):
        batch = pack(ids, mask, mask[:, 40:].bool(), share_prefixes=True)
        num_keys = len(batch.layout.offsets.key_places)
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(id(x), x), lambda x: x):
            model.base_model(**batch.inputs)
    gathered = [tensor for tensor in saved.values() if tensor.shape[:1] == (num_keys,) and tensor.is_floating_point()]
    share = 1 - batch.input_ids.shape[1] / num_keys  # without the keys that are counted with the tokens
    real = sum(tensor.nbytes for tensor in gathered) * share * (2 if critic else 1)
    sizes = {
        "per_device_train_batch_size": 8, "prompt_tokens": 40, "max_completion_length": 20, "critic": critic,
        "gradient_checkpointing": False,
    }  # fmt: skip
    line = "keys and values behind prefixes"
    estimate = lines_of(read_shape(config_of()), update_layout="shared", **sizes)[line]
    assert 0.85 * estimate <= real <= estimate
    assert line not in lines_of(read_shape(config_of()), update_layout="packed", **sizes)


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


ZERO_3 = {"zero_stage": 3, "num_processes": 4, "mixed_precision": True}
OFF = {"offload_optimizer": True, "offload_parameters": True}
OFFLOADED = ZERO_3 | OFF
FSDP2 = {"is_fsdp": True, "num_processes": 4, "mixed_precision": True}
OF_FSDP2, WHOLE = "FSDP2: weights gathered at a time", "FSDP2: the whole model, to generate"
QLORA = {"load_in_4bit": True, "dtype": "bfloat16"}
DDP, TWO = "DDP buckets: a second copy", {"num_processes": 2}
GENERATE, GATHERED = "ZeRO-3: the whole model, to generate", "ZeRO-3: weights gathered at a time"
VLLM, ASLEEP = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5}, {"vllm_enable_sleep_mode": True}
LONG = {"prompt_tokens": 100, "max_completion_length": 300}


@pytest.mark.parametrize(
    ("shape", "setup", "expected"),
    [
        # Bytes per parameter on each of 4 GPUs in mixed precision: 2 + 2 + 12, the 12 always over 4 = 3.
        *(
            (
                BILLION,
                {**ZERO_3, "zero_stage": stage},
                {"weights": weights * 1e9, "policy: gradients": gradients * 1e9, "policy: Adam": states * 1e9},
            )
            for stage, weights, gradients, states in ((0, 4, 4, 8), (1, 2, 2, 3), (2, 2, 0.5, 3), (3, 0.5, 0.5, 3))
        ),
        (BILLION, ZERO_3, {GENERATE: 2e9, "ZeRO buffer": 1e9, GATHERED: 2e9, DDP: None}),
        (BILLION, ZERO_3 | VLLM, {GENERATE: None}),
        (BILLION, OFFLOADED, {"weights": None, "policy: gradients": None, "policy: Adam": None}),
        # Float32 in four parts: 4 + 4 + 8; two layers of 80 M and the head of 100 M in 16 bits, its gradient in both.
        (BILLION, FSDP2, {"weights": 1e9, "policy: gradients": 1e9, "policy: Adam": 2e9, DDP: None, GATHERED: None}),
        (BILLION, FSDP2 | {"dtype": "bfloat16"}, {"weights": 1e9, "policy: gradients": 1e9, "policy: Adam": 2e9}),
        (BILLION, FSDP2, {OF_FSDP2: (2 * 8e7 + 1e8) * 2 + 1e8 * 6, WHOLE: 2e9, "autocast: 16-bit copies": None}),
        (LORA_BILLION, FSDP2 | {"dtype": "bfloat16"}, {"weights": 5e8, "policy: adapter": 1e7, "policy: Adam": 2e7}),
        (LORA_BILLION, FSDP2, {OF_FSDP2: (2 * 8e7 + 1e8) * 2}),
        (BILLION, FSDP2 | OFF, {"weights": None, "policy: gradients": None, "policy: Adam": None}),
        (LORA_BILLION, FSDP2 | OFF, {"policy: adapter": None}),
        (BILLION, FSDP2 | VLLM, {WHOLE: None}),
        (BILLION, TWO | {"critic": "model"}, {DDP: 4e9 + 4 * (1e9 - 1e8 + 1001), "ZeRO buffer": None}),
        (BILLION, {}, {DDP: None, "reference model": None, "policy: Adam": 8e9}),
        (BILLION, {"beta": 0.1}, {"reference model": 4e9}),
        (LORA_BILLION, {"beta": 0.1}, {"reference model": None}),
        (BILLION, {"optim": "adamw_bnb_8bit"}, {"policy: Adam": 2e9}),
        # 4 bits, and per 64 weights a scale of 4 bytes; the adapter in bfloat16.
        (LORA_BILLION, QLORA, {"weights": 0.5625 * 8e8 + 2 * 2e8, "policy: adapter": 2e7, "policy: Adam": 4e7}),
        (LORA_BILLION, {"load_in_8bit": True}, {"weights": 8e8 + 4 * 2e8}),
        (BILLION, VLLM, {"vLLM: its weights and KV cache": 40 * GIB, "KV cache": None}),
        (BILLION, VLLM | {"vllm_mode": "server"}, {"vLLM: its weights and KV cache": None, "KV cache": None}),
    ],
)
def test_a_line_is_what_is_counted_by_hand(shape, setup, expected):
    lines = lines_of(shape, **setup)
    assert {name: lines.get(name) for name in expected} == expected


def test_a_critic_with_its_own_graph_doubles_the_activations():
    plain, head, model = (lines_of(BILLION, critic=critic)["activations"] for critic in (None, "head", "model"))
    assert plain == head == model / 2


def test_packed_rows_save_no_mask():
    def saved(**changes):
        return layer_bytes(MemorySetup(shape=BILLION, per_device_train_batch_size=4, **LONG, **changes))

    without = saved(attn_implementation="flash_attention_2")
    assert saved(update_layout="packed") == without
    assert saved() - without == 4 * 400 * 400 * 4


def test_a_pass_by_tokens_holds_what_the_update_puts_into_it():
    """The largest pass of a real plan, with rows of all lengths up to the longest."""
    generator = torch.Generator().manual_seed(0)
    lengths = [100, *torch.randint(20, 101, (63,), generator=generator).tolist()]
    for limit, rows, most in ((300, 64, 300), (60, 64, 100), (10_000, 64, 6400), (10_000, 3, 300)):
        sizes = {"prompt_tokens": 20, "max_completion_length": 80, "max_tokens_per_micro_batch": limit}
        setup = MemorySetup(shape=BILLION, **sizes, update_layout="packed", update_rows=rows)
        ((*micro_batches,),) = plan_micro_batches(lengths[:rows], 1, limit)
        largest = max(sum(lengths[row] for row in chosen) for chosen in micro_batches)
        assert largest <= setup.micro_batch_tokens == most


# ---------------------------------------------------------------- the peak


def test_the_peak_takes_the_larger_of_update_and_rollout():
    setup = MemorySetup(shape=BILLION, **VLLM | ASLEEP)
    total = dict.fromkeys(("always", "update", "rollout"), 0.0)
    for line in estimate_memory(setup):
        total[line.phase] += line.bytes
    assert total["rollout"] == 40 * GIB > total["update"]
    assert find_peak(estimate_memory(setup)) == total["always"] + total["rollout"]


@pytest.mark.parametrize(("peak", "verdict"), [(0.9, "fits"), (0.91, "tight"), (1.01, "does not fit")])
def test_the_verdict_compares_the_peak_with_the_gpu(peak, verdict):
    assert judge(20 * GIB * peak, 20) == verdict


def test_what_fsdp2_does_not_split_is_refused():
    with pytest.raises(ValueError, match=r"load_in_4bit=True.*ddp\.yaml"):
        MemorySetup(shape=LORA_BILLION, load_in_4bit=True, is_fsdp=True, num_processes=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int8"},
        {"optim": "sgd"},
        {"vllm_mode": "tgi"},
        {"critic": "heads"},
        {"num_processes": 0},
        {"gpu_memory_gb": 0},
        {"critic": "adapter"},
        {"max_tokens_per_micro_batch": 2048},
        {"load_in_4bit": True},
        # Two bytes for each of 10^9 parameters are 1.86 GiB; 0.0019 of the GPU holds them.
        {"vllm_gpu_memory_utilization": 0.0018, "use_vllm": True, "gpu_memory_gb": 1000},
    ],
)
def test_a_run_that_cannot_be_is_refused(changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        MemorySetup(shape=BILLION, **changes)
    MemorySetup(shape=BILLION, use_vllm=True, gpu_memory_gb=1000, vllm_gpu_memory_utilization=0.0019)


# ---------------------------------------------------------------- a limit of tokens


LIMITED = {"update_layout": "packed", "prompt_tokens": 500, "max_completion_length": 1500}


def test_the_limit_is_the_largest_that_fits():
    """Against the estimate with one step of tokens less, and one more."""
    setup = MemorySetup(shape=BILLION, gpu_memory_gb=22, **LIMITED)
    limit = find_token_limit(setup)
    room = TIGHT * 22 * GIB
    assert limit.fits and LEAST_TOKENS < limit.tokens < MOST_TOKENS and limit.tokens % LEAST_TOKENS == 0
    found, more = (
        find_peak(estimate_memory(replace(setup, max_tokens_per_micro_batch=limit.tokens + extra, use_vllm=True,
                                          vllm_mode="server")))
        for extra in (0, LEAST_TOKENS)
    )  # fmt: skip
    assert found == limit.peak <= room < more
    with_other = find_token_limit(setup, other_bytes=GIB / 2)
    assert with_other.fits and with_other.tokens < limit.tokens and with_other.peak <= room + GIB / 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpu_memory_gb": 1000}, (MOST_TOKENS, True)),
        ({"gpu_memory_gb": 10}, (LEAST_TOKENS, False)),
        # What the rollout needs, and rows that are longer than the limit, are not the limit's business.
        ({"generation_batch_rows": 10_000}, (MOST_TOKENS, True)),
        ({"prompt_tokens": 10_000, "max_completion_length": 500_000}, (MOST_TOKENS, True)),
        ({"per_device_train_batch_size": 1000}, (MOST_TOKENS, True)),
        ({"max_tokens_per_micro_batch": 5}, (MOST_TOKENS, True)),
    ],
)
def test_the_limit_has_bounds_and_reads_what_it_changes_alone(changes, expected):
    limit = find_token_limit(MemorySetup(shape=BILLION, **{"gpu_memory_gb": 80.0} | LIMITED | changes))
    assert limit[::2] == expected


def test_a_limit_is_lower_where_more_is_kept_for_each_token():
    def tokens(**changes):
        return find_token_limit(MemorySetup(shape=BILLION, **{"gpu_memory_gb": 22} | LIMITED | changes)).tokens

    assert tokens(gradient_checkpointing=False) < tokens() < tokens(mixed_precision=True)
    # Sixteen bytes a parameter on one GPU; a quarter of that and buffers on each of four.
    assert tokens(gpu_memory_gb=12) < tokens(gpu_memory_gb=12, **ZERO_3)
    few = {"gpu_memory_gb": 42, "gradient_checkpointing": False}
    assert tokens(**few, critic="model") < tokens(**few)


def test_checkpointing_is_needless_where_the_run_fits_without():
    def needless(**changes):
        return is_checkpointing_needless(MemorySetup(shape=BILLION, **LIMITED | changes))

    assert needless(gpu_memory_gb=1000) and not needless(gpu_memory_gb=20)
    assert not needless(gpu_memory_gb=1000, gradient_checkpointing=False)
    setup = MemorySetup(
        shape=BILLION, **LIMITED, gradient_checkpointing=False, max_tokens_per_micro_batch=ENOUGH_TOKENS
    )
    enough = find_peak(estimate_memory(setup)) / GIB / TIGHT
    for limit in (ENOUGH_TOKENS, MOST_TOKENS):  # the update may take smaller micro-batches
        assert needless(gpu_memory_gb=enough + 0.01, max_tokens_per_micro_batch=limit)
        assert not needless(gpu_memory_gb=enough - 0.01, max_tokens_per_micro_batch=limit)


# ---------------------------------------------------------------- sizes of a model that is loaded


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["whole", "adapter"])
def test_a_loaded_model_has_the_sizes_of_its_configuration(peft_config):
    model = real_model(config_of(), peft_config=peft_config)
    assert shape_of(model) == read_shape(config_of(), copy.deepcopy(peft_config))


def test_a_saved_head_counts_with_the_adapter_alone():
    lora = LoraConfig(r=2, target_modules=["down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    adapted, plain = shape_of(real_model(config_of(), peft_config=lora)), shape_of(real_model(config_of()))
    assert adapted.num_parameters == plain.num_parameters
    assert adapted.num_linear_parameters == plain.num_linear_parameters
    assert adapted.num_adapter_parameters == 64 * 128 + 3 * 2 * (352 + 128)


def test_weights_of_which_this_process_holds_a_part_count_whole():
    model = real_model(config_of())
    whole = shape_of(model)
    for parameter in model.parameters():  # as ZeRO-3 leaves them
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)
    assert shape_of(model) == whole


def test_weights_in_4_bits_count_as_numbers():
    """As bitsandbytes leaves them: two numbers in a byte, the shape beside them."""
    model = real_model(config_of())
    whole = shape_of(model)
    linear = [module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for module in linear:
        shape, numel = module.weight.shape, module.weight.numel()
        codes = torch.nn.Parameter(torch.zeros(numel // 2, 1, dtype=torch.uint8), requires_grad=False)
        codes.quant_state = SimpleNamespace(shape=shape)
        module.weight = codes
    assert shape_of(model) == whole
