"""`max_tokens_per_micro_batch: auto`: what it takes on a GPU, and whether the run's update keeps to it.

The GPU is pretended: its memory is a pair of numbers, models and rows stay on the CPU. Covered: the limit and its
line, everything that leads to none, ranks that disagree, what else occupies the GPU. Not covered: a GPU.
"""

import io
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer, token_limit
from agent_r1_trl.trainers.memory import CONTEXT_BYTES, GIB, TokenLimit, estimate_memory, find_token_limit, shape_of
from agent_r1_trl.trainers.token_limit import CHECKPOINTING_HINT, GpuMemory, choose_token_limit
from agent_r1_trl.update import layout as layouts
from tests.trainers.helpers import make_trainer
from tests.trainers.test_memory import num_bytes

HUGE = GpuMemory(total=1000 * GIB, occupied=0)
TAKES = "max_tokens_per_micro_batch: auto takes"
PACKED = {"update_layout": "shared"}


@pytest.fixture
def gpu(monkeypatch):
    """Sets the memory of the pretended GPU."""
    monkeypatch.setattr(layouts, "is_on_cuda", lambda args: True)

    def has(memory):
        monkeypatch.setattr(token_limit, "read_gpu_memory", lambda device: memory)

    has(HUGE)
    return has


def chosen(trainer):
    """The limit of a run that begins, and the line about it."""
    choose_token_limit(trainer)
    lines = [note for note in trainer.layout.notes if note.startswith(TAKES)]
    return trainer.layout.max_tokens, lines[0] if lines else ""


def room_for(trainer, tokens):
    """A GPU on which exactly so many tokens fit."""
    setup, _ = token_limit._read_setup(trainer)
    low, high = 0, 1000 * GIB
    while high - low > 1:
        total = (low + high) // 2
        limit = find_token_limit(replace(setup, gpu_memory_gb=total / GIB))
        if limit.fits and limit.tokens >= tokens:
            high = total
        else:
            low = total
    return GpuMemory(total=high, occupied=0)


# -------------------------------------------------------------------- what it takes


def test_on_a_cpu_there_is_no_limit_and_nothing_is_said(tmp_path):
    trainer = make_trainer(tmp_path, **PACKED)
    assert trainer.args.max_tokens_per_micro_batch == "auto"
    assert chosen(trainer) == (None, "") and trainer.layout.notes == []


def test_on_a_large_gpu_it_is_the_most_that_it_takes(gpu, tmp_path):
    limit, line = chosen(make_trainer(tmp_path))
    assert limit == 32_768
    assert line.startswith(f"{TAKES} 32,768, the most that it takes: by formula the update then needs 1.")


def test_on_a_small_gpu_it_is_the_most_that_fits_and_the_line_comes_once(gpu, tmp_path, caplog):
    trainer = make_trainer(tmp_path)
    gpu(room_for(trainer, 5000))
    with caplog.at_level(logging.INFO, "agent_r1_trl"):
        limit, line = chosen(trainer)
        choose_token_limit(trainer)
    assert limit == 5 * 1024
    assert f"{TAKES} 5,120, the most that fits: by formula" in line
    assert caplog.text.count(TAKES) == 1
    assert "update_layout: auto takes 'shared', the fastest" in caplog.text


def test_the_lines_stand_in_front_of_the_first_step(gpu, tmp_path):
    trainer = make_trainer(tmp_path)
    shown = io.StringIO()
    trainer.features["progress"].console = PlainConsole(file=shown, width=400)
    trainer.train()
    plan, layout_and_limit = shown.getvalue().split("\n\n")
    layout, limit, *steps = layout_and_limit.splitlines()
    assert plan.startswith("model ")
    assert layout.startswith("update_layout: auto takes 'shared'") and limit.startswith(f"{TAKES} 32,768")
    assert steps and not any("auto takes" in line for line in steps)


def test_a_model_that_is_too_large_gets_the_least_and_a_warning(gpu, tmp_path, caplog):
    trainer = make_trainer(tmp_path)
    gpu(GpuMemory(total=GIB // 2, occupied=0))
    with caplog.at_level(logging.WARNING, "agent_r1_trl"):
        limit, line = chosen(trainer)
    assert (limit, line) == (1024, "")
    assert f"{TAKES} 1,024, the least, and by formula the update then needs 1." in caplog.text
    assert "which is too much. agent-r1-trl memory lists" in caplog.text


def test_the_update_keeps_to_it(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(token_limit, "find_token_limit", lambda *args: TokenLimit(300, GIB, True))
    by_auto = make_trainer(tmp_path / "a", gradient_accumulation_steps=2, max_steps=1)
    by_auto.train()
    by_number = make_trainer(
        tmp_path / "b", gradient_accumulation_steps=2, max_steps=1, max_tokens_per_micro_batch=300
    )
    by_number.train()
    auto, number = by_auto.state.log_history[0], by_number.state.log_history[0]
    assert auto["update/micro_batches"] == number["update/micro_batches"] > 1
    assert auto["grad_norm"] == pytest.approx(number["grad_norm"], rel=1e-6)


def test_checkpointing_and_lora_change_it(gpu, tmp_path):
    def trainer_of(name, **options):
        return make_trainer(tmp_path / name, **options)

    trainer = trainer_of("plain", gradient_checkpointing=False)
    plain, _ = token_limit._read_setup(trainer)
    gpu(room_for(trainer, 8192))
    assert chosen(trainer)[0] == 8192
    assert chosen(trainer_of("checkpointed", gradient_checkpointing=True))[0] > 8192
    adapter = LoraConfig(r=2, target_modules="all-linear")
    trainer = trainer_of("lora", gradient_checkpointing=False, peft_config=adapter)
    assert chosen(trainer)[0] not in (8192, None)  # adapters save inputs of their own
    lora, _ = token_limit._read_setup(trainer)
    assert lora.shape.num_parameters == plain.shape.num_parameters
    assert lora.shape.num_adapter_parameters > 0 == plain.shape.num_adapter_parameters


@pytest.mark.parametrize("critic", ["head", "model"])
def test_a_critic_is_counted_and_is_not_taken_for_the_policy(gpu, tmp_path, critic):
    plain = make_trainer(tmp_path / "plain")
    trainer = make_trainer(tmp_path / critic, trainer=MultiTurnPPOTrainer, critic=critic)
    setup, _ = token_limit._read_setup(trainer)
    assert setup.critic == critic
    assert setup.shape == shape_of(plain.model)


# -------------------------------------------------------------------- what leads to none


class OwnLossTrainer(MultiTurnGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"update_layout": "padded"}, "update_layout='padded' keeps micro-batches of per_device_train_batch_size"),
        ({"loss_type": "bnpo"}, "loss_type='bnpo'.*this moves rows between micro-batches"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1.*this moves rows"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "update_layout": "packed"},
            "neither is a multiple of the other",
        ),
        ({"optim": "sgd"}, "the memory is not estimated: optim='sgd'"),
        ({"trainer": OwnLossTrainer}, "the trainer has a _compute_loss of its own"),
    ],
)
def test_what_does_not_go_with_a_limit_leads_to_none(gpu, tmp_path, options, cause):
    limit, line = chosen(make_trainer(tmp_path, **options))
    assert limit is None
    assert re.match(f"{TAKES} none, since .*{cause}", line), line


def test_a_mixture_of_experts_is_not_estimated(gpu, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.config.num_local_experts = 8
    limit, line = chosen(trainer)
    assert limit is None and "the formulas do not cover mixtures of experts. Set max_tokens" in line


def test_an_estimate_that_fails_ends_no_run(gpu, tmp_path, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA driver error")

    monkeypatch.setattr(token_limit, "read_gpu_memory", fail)
    limit, line = chosen(make_trainer(tmp_path))
    assert limit is None and "since the memory is not estimated: CUDA driver error" in line


def test_none_and_a_number_are_kept_as_they_are(gpu, tmp_path):
    assert chosen(make_trainer(tmp_path / "none", max_tokens_per_micro_batch=None)) == (None, "")
    assert chosen(make_trainer(tmp_path / "number", max_tokens_per_micro_batch=777)) == (777, "")


# -------------------------------------------------------------------- what else lies on the GPU


def test_what_occupies_the_gpu_besides_lowers_it(gpu, tmp_path):
    """A reward model, another process: whatever is there and has no line in the estimate."""
    trainer = make_trainer(tmp_path)
    memory = room_for(trainer, 20_000)
    setup, _ = token_limit._read_setup(trainer)
    known = sum(line.bytes for line in estimate_memory(setup) if line.is_loaded)
    assert known == CONTEXT_BYTES + num_bytes(trainer.model.parameters())
    limits = []
    for unknown in (-int(known), 0, 200 * 2**20):
        gpu(memory._replace(occupied=int(known) + unknown))
        limits.append(chosen(make_trainer(tmp_path))[0])
    assert limits[:2] == [20_480, 20_480] and limits[2] < 20_480


def test_the_smallest_limit_of_all_ranks_holds_for_each(gpu, tmp_path, monkeypatch):
    small, large = TokenLimit(4096, 7 * GIB, True), TokenLimit(40_960, 70 * GIB, True)
    for others, expected in (([small], 4096), ([large], 32_768), ([None], None)):
        monkeypatch.setattr(token_limit, "gather_object", lambda own, others=others: own + others)
        limit, line = chosen(make_trainer(tmp_path))
        assert limit == expected
        assert ("another rank has none" in line) == (expected is None)
        assert ("the update then needs 7.0 GiB" in line) == (expected == 4096)


OFFLOAD = {"offload_optimizer_device": "cpu", "offload_param_device": "none", "zero_stage": 2}


@pytest.mark.parametrize(
    ("kind", "state", "expected"),
    [
        ("MULTI_GPU", {}, {}),
        (
            "DEEPSPEED",
            {"deepspeed_plugin": SimpleNamespace(**OFFLOAD)},
            {"zero_stage": 2, "offload_optimizer": True, "offload_parameters": False},
        ),
        (
            "FSDP",
            {"fsdp_plugin": SimpleNamespace(cpu_offload=OffloadPolicy())},
            {"is_fsdp": True, "offload_optimizer": False, "offload_parameters": False},
        ),
        (
            "FSDP",
            {"fsdp_plugin": SimpleNamespace(cpu_offload=CPUOffloadPolicy())},
            {"is_fsdp": True, "offload_optimizer": True, "offload_parameters": True},
        ),
    ],
)
def test_shards_are_read_from_the_launch(kind, state, expected):
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind], state=SimpleNamespace(**state))
    assert token_limit._read_sharding(accelerator) == expected


# -------------------------------------------------------------------- gradient checkpointing


def test_checkpointing_that_is_not_needed_is_named_beside_it(gpu, tmp_path):
    def notes(**options):
        trainer = make_trainer(tmp_path, **options)
        choose_token_limit(trainer)
        return trainer.layout.notes

    assert CHECKPOINTING_HINT in notes(gradient_checkpointing=True)
    assert CHECKPOINTING_HINT not in notes(gradient_checkpointing=False)
    assert notes(gradient_checkpointing=True, update_layout="padded", max_tokens_per_micro_batch=None) == [
        CHECKPOINTING_HINT
    ]
    gpu(room_for(make_trainer(tmp_path, gradient_checkpointing=True), 8192))
    assert CHECKPOINTING_HINT not in notes(gradient_checkpointing=True)
