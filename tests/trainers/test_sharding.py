"""Which settings go with FSDP2, and in which precision it hands over results."""

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from agent_r1_trl.trainers import MultiTurnGRPOConfig
from agent_r1_trl.trainers.sharding import check_not_quantised, keep_log_probs_exact
from tests.trainers.effects import CPU


def on_gpus(**options):
    """A configuration that believes it is on a GPU."""

    class OnGPUs(MultiTurnGRPOConfig):
        @property
        def device(self):
            assert super().device.type == "cpu"
            return torch.device("cuda")

    return OnGPUs(**CPU, **options)


@pytest.fixture
def launched(monkeypatch):
    """The environment of `accelerate launch` with fsdp2.yaml, as far as it matters."""
    settings = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_fsdp2_passes_on_gpus_and_is_refused_on_a_cpu_with_its_source(launched):
    on_gpus().check_supported()
    with pytest.raises(ValueError, match=r"^fsdp=True \(ACCELERATE_USE_FSDP=true: .* on a CPU: .*cpu_2proc_zero3"):
        MultiTurnGRPOConfig(**CPU).check_supported()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FSDP_VERSION", "1", r"version 1: only FSDP2 .* fsdp_version: 2"),
        ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", r"SHARDED_STATE_DICT: .*Set fsdp_state_dict_type: FULL_STATE"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", r"activation_checkpointing: .*gradient_checkpointing: true"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", r"not covered yet\. Set fsdp_cpu_ram_efficient_loading: false"),
    ],
)
def test_settings_of_the_launcher_that_do_not_go_with_it_are_refused(launched, variable, value, message):
    launched.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        on_gpus().check_supported()


def test_a_launcher_that_says_nothing_means_fsdp1_and_a_recipe_fsdp2(launched):
    launched.delenv("FSDP_VERSION")
    with pytest.raises(ValueError, match="version 1"):
        on_gpus().check_supported()
    launched.delenv("ACCELERATE_USE_FSDP")
    on_gpus(fsdp="full_shard").check_supported()
    with pytest.raises(ValueError, match="version 1"):
        on_gpus(fsdp="full_shard", fsdp_config={"version": 1}).check_supported()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "steps_per_generation=2"),
        ({"torch_compile": True}, "torch_compile"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
    ],
)
def test_what_has_not_been_tried_with_it_is_refused_by_name(launched, options, message):
    with pytest.raises(ValueError, match=rf"{message}.* with FSDP2 is not covered yet\. .*zero3\.yaml"):
        on_gpus(**options).check_supported()
    launched.delenv("ACCELERATE_USE_FSDP")
    on_gpus(**options).check_supported()


def test_quantised_weights_are_refused():
    model = nn.Linear(2, 2)
    check_not_quantised(model)
    model.codes = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"load_in_4bit .* not covered yet\. Use .*ddp\.yaml"):
        check_not_quantised(model)


def test_what_the_model_returns_is_not_rounded():
    class State:
        fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    class Accelerator:
        state = State

    State.fsdp_plugin.set_mixed_precision("bf16")
    assert State.fsdp_plugin.mixed_precision_policy.output_dtype == torch.bfloat16, "accelerate rounds it no more"
    keep_log_probs_exact(Accelerator)
    assert State.fsdp_plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None)
