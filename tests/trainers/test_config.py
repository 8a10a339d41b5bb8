"""Bad settings are refused with the flag, the value, the rule and the fix."""

import contextlib
import sys
from dataclasses import fields
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import HfArgumentParser, TrainingArguments
from trl import GRPOConfig, RLOOConfig, SFTConfig

from agent_r1_trl.advantages.estimators import ESTIMATORS
from agent_r1_trl.cli.parser import RecipeParser
from agent_r1_trl.generation.vllm.build import check_vllm, server_urls
from agent_r1_trl.trainers.config import (
    ModelConfig,
    MultiTurnConfig,
    MultiTurnGRPOConfig,
    MultiTurnPPOConfig,
    get_peft_config,
)
from agent_r1_trl.trainers.config_checks import LAUNCHED
from tests.generation.helpers import tiny_model

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}


def test_what_belongs_to_an_estimator_is_set_and_what_contradicts_it_is_refused():
    for name, row in ESTIMATORS.items():
        config_class = MultiTurnPPOConfig if row.needs_critic else MultiTurnGRPOConfig
        config = config_class(**CPU, advantage_estimator=name)
        assert config.gamma_turn == row.default_gamma_turn
        assert row.loss_type in (None, config.loss_type)
        for option, refused in (
            ({"loss_type": "bnpo"}, row.loss_type is not None),
            ({"scale_rewards": "batch"}, name not in ("grpo", "reinforce_pp", "reinforce_pp_baseline")),
            ({"scale_rewards": False}, name in ("reinforce_pp", "reinforce_pp_baseline", "turn_grpo", "gigpo")),
            ({"scale_rewards": True}, False),
            ({"gamma": 0.5}, "gamma" not in row.options),
            ({"gamma_turn": 0.5}, "gamma_turn" not in row.options),
            ({"gamma_turn": row.default_gamma_turn}, False),
            ({"step_weight": 0.5}, name != "gigpo"),
            ({"num_generations": 1}, row.needs_group),
            ({"kl_placement": "reward", "beta": 0.1}, not row.reads_token_rewards),
            ({"separate_process_advantages": True}, row.needs_critic),
            (
                {
                    "kl_placement": "reward",
                    "beta": 0.1,
                    "separate_process_advantages": True,
                    "outcome_reward_weight": 0,
                },
                True,
            ),
        ):
            expected = pytest.raises(ValueError, match=next(iter(option))) if refused else contextlib.nullcontext()
            with expected:
                config_class(**CPU, advantage_estimator=name, **option)
    assert MultiTurnGRPOConfig(**CPU, advantage_estimator="gigpo").gamma_turn == 0.95
    assert MultiTurnGRPOConfig(**CPU, advantage_estimator="dr_grpo").loss_type == "dr_grpo"
    with pytest.raises(ValueError, match=r"lam_turn=0\.5 .*'bilevel_gae'"):
        MultiTurnPPOConfig(**CPU, lam_turn=0.5)
    MultiTurnPPOConfig(**CPU, lam_turn=0.5, advantage_estimator="bilevel_gae")


def test_a_fix_names_no_estimator_of_the_other_trainer():
    for options in ({"num_generations": 1}, {"kl_placement": "reward", "beta": 0.1}):
        with pytest.raises(ValueError, match="advantage_estimator to one of 'reinforce_pp'") as refusal:
            MultiTurnGRPOConfig(**CPU, **options)
        assert "gae" not in str(refusal.value)


OLDER = {"rollouts_ahead": 1}
MODE, LIMIT = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"


@pytest.mark.parametrize(
    ("given", "mode", "limit"),
    [
        ({}, "sequence_mask", 3.0),
        ({"use_vllm": True}, "sequence_mask", 3.0),
        (OLDER, "token_truncate", 2.0),
        (OLDER | {MODE: "sequence_mask"}, "sequence_mask", 3.0),
        (OLDER | {MODE: "token_mask"}, "token_mask", 3.0),
        (OLDER | {LIMIT: 3.0}, "token_truncate", 3.0),
        (OLDER | {LIMIT: 5.0, MODE: "sequence_truncate"}, "sequence_truncate", 5.0),
        (OLDER | {MODE: "sequence_mask", LIMIT: None}, "sequence_mask", None),
    ],
)
@pytest.mark.parametrize("config_class", [MultiTurnGRPOConfig, MultiTurnPPOConfig])
@pytest.mark.parametrize("reads", [None, HfArgumentParser, RecipeParser])
def test_ratios_to_older_weights_are_of_tokens_and_truncated_unless_the_user_says_otherwise(
    given, mode, limit, config_class, reads
):
    options = CPU | given
    words = []
    for name, value in options.items():
        words += [f"--{name}", "null" if value is None else str(value)]
    if reads is None:
        config = config_class(**options)
    elif reads is RecipeParser:
        (config,) = RecipeParser([config_class], command="train").parse(words)
    elif None not in options.values():  # which transformers' command line cannot say
        (config,) = HfArgumentParser([config_class]).parse_args_into_dataclasses(words)
    else:
        return
    assert (getattr(config, MODE), getattr(config, LIMIT)) == (mode, limit)
    assert type(getattr(config, MODE)) is str and type(getattr(config, LIMIT)) in (float, type(None))


def test_a_plain_grpo_config_is_accepted_and_left_untouched():
    plain = GRPOConfig(**CPU, max_completion_length=77, mask_truncated_completions=True)
    config = MultiTurnGRPOConfig.from_grpo_config(plain)
    assert isinstance(config, MultiTurnGRPOConfig)
    assert (config.max_completion_length, config.truncated_trajectories) == (77, "mask")
    limits = config.rollout_limits()  # TRL knows none of these: as large as the completion, they end nothing
    assert (limits.max_turns, limits.max_invalid_calls, limits.max_observation_tokens) == (77, 77, 77)
    assert type(plain) is GRPOConfig
    assert not hasattr(plain, "max_turns")


def test_the_arguments_of_another_trainer_are_refused_with_the_right_class():
    for config_class, args in (
        (MultiTurnGRPOConfig, MultiTurnPPOConfig(**CPU)),
        (MultiTurnPPOConfig, MultiTurnGRPOConfig(**CPU)),
        (MultiTurnGRPOConfig, SFTConfig(**CPU)),
        (MultiTurnPPOConfig, RLOOConfig(**CPU)),
        (MultiTurnGRPOConfig, TrainingArguments(output_dir="unused", use_cpu=True)),
        (MultiTurnPPOConfig, {"output_dir": "unused"}),
    ):
        right = f"args={type(args).__name__} is not .* Pass args={config_class.__name__}"
        with pytest.raises(TypeError, match=right):
            config_class.from_grpo_config(args)


def test_a_plain_grpo_config_keeps_its_groups_in_the_ppo_trainer():
    config = MultiTurnPPOConfig.from_grpo_config(GRPOConfig(**CPU))
    assert (config.num_generations, config.advantage_estimator, config.lam) == (8, "gae", 0.95)


def test_what_trl_accepts_is_checked_only_where_our_rollout_runs():
    for flag, options in {
        "max_completion_length": {"max_completion_length": None},
        "top_p": {"use_vllm": True, "top_p": 0.9},
        "vespo_k_pos": {"vespo_k_pos": 1.0},
        "generation_kwargs": {"generation_kwargs": {"num_beams": 2}},
        "temperature": {"temperature": 0.0},
    }.items():
        for config in (MultiTurnGRPOConfig(**CPU, **options), GRPOConfig(**CPU, **options)):
            config = MultiTurnGRPOConfig.from_grpo_config(config)
            with pytest.raises(ValueError, match=f"^{flag}="):
                config.check_supported()


def test_a_script_for_trl_with_sensible_values_is_accepted():
    plain = GRPOConfig(
        **CPU, learning_rate=1e-5, temperature=0.9, top_p=0.95, beta=0.001, num_iterations=2, epsilon_high=0.28,
        scale_rewards=False, mask_truncated_completions=True, log_completions=True, num_completions_to_print=2,
        chat_template_kwargs={"enable_thinking": False}, max_tool_calling_iterations=3, pad_to_multiple_of=8,
        vllm_mode="server", vllm_server_port=8001, vllm_gpu_memory_utilization=0.5, vllm_tensor_parallel_size=2,
        loss_type="bnpo", importance_sampling_level="sequence", gradient_checkpointing=False,
    )  # fmt: skip
    MultiTurnGRPOConfig.from_grpo_config(plain).check_supported()
    MultiTurnPPOConfig.from_grpo_config(plain).check_supported()


def test_sharded_weights_are_gathered_for_ranks_that_sample_at_their_own_pace():
    class Sharded(MultiTurnGRPOConfig):
        world_size = 2

    config = Sharded(**CPU, ds3_gather_for_generation=False)
    config.check_supported()  # nothing is sharded
    config.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match=r"ds3_gather_for_generation=False .* Set ds3_gather_for_generation=True"):
        config.check_supported()
    config.check_supported(has_generator=True)
    config.ds3_gather_for_generation = True
    config.check_supported()


@pytest.mark.parametrize("name", LAUNCHED)
def test_parallelism_of_accelerate_is_refused_wherever_it_was_asked_for(monkeypatch, name):
    config = MultiTurnGRPOConfig(**CPU)
    config.check_supported()
    variable, _ = LAUNCHED[name]
    monkeypatch.setenv(variable, "false")
    config.check_supported()
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=rf"^{name}=True \({variable}=true: accelerate launch .*fsdp2\.yaml"):
        config.check_supported()


def test_servers_come_from_our_list_or_from_trls_arguments():
    server = {"use_vllm": True, "vllm_mode": "server"}
    urls = ["http://a:1", "http://b:2"]
    assert server_urls(MultiTurnGRPOConfig(**CPU, **server, servers={"urls": urls})) == urls
    assert server_urls(MultiTurnGRPOConfig(**CPU, **server, vllm_server_base_url="http://c:3")) == ["http://c:3"]
    config = MultiTurnGRPOConfig(**CPU, **server, vllm_server_host="d", vllm_server_port=4)
    assert server_urls(config) == ["http://d:4"]


def test_an_engine_in_the_process_needs_the_package_and_a_server_does_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"vLLM is not installed\. pip install 'agent-r1-trl\[vllm\]'"):
        check_vllm(MultiTurnGRPOConfig(**CPU, use_vllm=True), tiny_model(), is_on_gpu=False)
    check_vllm(MultiTurnGRPOConfig(**CPU, use_vllm=True, vllm_mode="server"), tiny_model(), is_on_gpu=False)


def test_weights_in_8_bits_need_a_server_of_adapters_and_those_in_4_bits_do_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    sys.modules["vllm"].__spec__ = ModuleSpec("vllm", None)
    model = tiny_model()
    model.quantised = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"quantised weights .* vllm_mode='server'"):
        check_vllm(MultiTurnGRPOConfig(**CPU, use_vllm=True), model, is_on_gpu=True)
    check_vllm(MultiTurnGRPOConfig(**CPU, use_vllm=True), tiny_model(), is_on_gpu=True)
    model.quantised.__class__ = type("Params4bit", (nn.Parameter,), {})
    check_vllm(MultiTurnGRPOConfig(**CPU, use_vllm=True), model, is_on_gpu=True)
    check_vllm(MultiTurnGRPOConfig(**CPU, use_vllm=True, vllm_mode="server"), model, is_on_gpu=True)


@pytest.mark.parametrize(("mode", "is_on_gpu"), [("colocate", False), ("server", True)])
def test_an_engine_that_cannot_sleep_is_not_asked_to(monkeypatch, mode, is_on_gpu):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    sys.modules["vllm"].__spec__ = ModuleSpec("vllm", None)
    config = MultiTurnGRPOConfig(**CPU, use_vllm=True, vllm_mode=mode, vllm_enable_sleep_mode=True)
    with pytest.raises(ValueError, match="on a GPU can sleep"):
        check_vllm(config, tiny_model(), is_on_gpu=is_on_gpu)
    config.vllm_mode = "colocate"
    check_vllm(config, tiny_model(), is_on_gpu=True)


@pytest.mark.parametrize(
    ("names", "adapted"),
    [(["q_proj"], 2), (["q_proj", "v_proj"], 4), (["all-linear"], 14), ([r".*layers\.1.*q_proj"], 1)],
    ids=str,
)
def test_target_modules_are_names_also_a_lone_one(names, adapted):
    config = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=names))
    model = get_peft_model(tiny_model(), config)
    assert sum(name.endswith("lora_A.default") for name, _ in model.named_modules()) == adapted


def test_adapters_of_a_recipe_have_no_dropout_unless_it_asks_for_it():
    assert get_peft_config(ModelConfig(use_peft=True)).lora_dropout == 0.0
    assert get_peft_config(ModelConfig(use_peft=True, lora_dropout=0.1)).lora_dropout == 0.1
    assert get_peft_config(ModelConfig()) is None


def test_every_field_of_ours_has_help():
    ours = {item.name: item for config in (MultiTurnConfig, MultiTurnPPOConfig) for item in fields(config)}
    own = set(ours) - {item.name for item in fields(GRPOConfig)}
    assert len(own) >= 30
    for name in own:
        assert ours[name].metadata["help"], name


@pytest.mark.parametrize(
    ("given", "has_gpu", "bf16"), [(None, False, False), (None, True, True), (False, True, False)]
)
def test_bf16_is_off_where_there_is_no_gpu_and_nobody_asked_for_it(monkeypatch, tmp_path, given, has_gpu, bf16):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: has_gpu)
    # use_cpu: so that transformers does not look for the GPU that is not there
    assert MultiTurnGRPOConfig(output_dir=str(tmp_path), bf16=given, use_cpu=has_gpu).bf16 is bf16


def test_no_memory_is_pinned_where_there_is_no_gpu_to_copy_to(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert MultiTurnGRPOConfig(output_dir=str(tmp_path), bf16=False).dataloader_pin_memory is False


@pytest.mark.parametrize(
    "sizes",
    [
        {"train_micro_batch_size_per_gpu": "auto"},
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 8},
        {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
    ],
)
def test_a_deepspeed_configuration_that_says_auto_or_the_same_is_accepted(tmp_path, sizes):
    pytest.importorskip("deepspeed")
    deepspeed = {"zero_optimization": {"stage": 1}, **sizes}
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    assert MultiTurnGRPOConfig(str(tmp_path), deepspeed=deepspeed, bf16=False, use_cpu=True, **given)
