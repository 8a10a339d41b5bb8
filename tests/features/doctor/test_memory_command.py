"""`agent-r1-trl memory` reads a recipe and an accelerate configuration as `train` would, and says whether it fits.

Covered: what the settings become, the printed table, exit codes, mistakes. Not covered: the arithmetic
(tests/trainers/test_memory.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from transformers import MambaConfig, Qwen2Config

from agent_r1_trl.cli import main
from agent_r1_trl.features.doctor import memory_command
from agent_r1_trl.features.doctor.memory_command import read_accelerate_config, read_setup, run
from agent_r1_trl.trainers.memory import ModelShape
from tests.trainers.test_memory import BILLION

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "recipes" / "accelerate_configs"
RECIPES = [path for path in sorted((ROOT / "recipes").glob("*/*/*.yaml")) if path.stem.startswith("config")]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A directory with a configuration and no weights; 7.6 billion parameters."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def known_shape(monkeypatch):
    """The shape is not read from the model, which takes a second."""
    shape = vars(BILLION) | {"num_adapter_parameters": 10**7, "max_positions": 32_768}
    monkeypatch.setattr(memory_command, "read_shape", lambda config, peft_config: ModelShape(**shape))


def setup_of(model, *options):
    given = [] if "--gpu_memory_gb" in options else ["--gpu_memory_gb", "80"]
    return read_setup(["--model_name_or_path", model, *given, *options])


def write_recipe(folder, **settings) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


GPU_RECIPES = [path for path in RECIPES if "GPU" in path.read_text(encoding="utf-8").splitlines()[0]]
QWEN = {"0.5B": (896, 4864, 24, 14), "1.5B": (1536, 8960, 28, 12), "3B": (2048, 11_008, 36, 16)}


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: "/".join(path.parts[-3:]))
def test_a_recipe_fits_the_gpus_that_it_names(path, tmp_path, capsys):
    """Weights in float32, their gradients and Adam's states are counted; Qwen2.5's shapes stand here."""
    recipe, head = yaml.safe_load(path.read_text(encoding="utf-8")), path.read_text(encoding="utf-8").splitlines()[0]
    (size,) = (size for size in QWEN if f"Qwen2.5-{size}" in recipe["model_name_or_path"])
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    rest = {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
    Qwen2Config(**dict(zip(names, QWEN[size], strict=True)), **rest).save_pretrained(tmp_path)
    command = ["--config", str(path), "--model_name_or_path", str(tmp_path), "--gpu_memory_gb", "80"]
    assert "of 80 GB" in head
    if "8 GPUs" in head:
        command += ["--accelerate_config", str(CONFIGS / "zero2.yaml"), "--num_processes", "8"]
    assert run(command) == 0 and "\nfits: " in capsys.readouterr().out


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: "/".join(path.parts[-3:]))
def test_it_reads_every_recipe(path, model, known_shape):
    recipe, setup = yaml.safe_load(path.read_text(encoding="utf-8")), setup_of(model, "--config", str(path))
    assert setup.per_device_train_batch_size == recipe["per_device_train_batch_size"]
    assert setup.max_completion_length == recipe["max_completion_length"]
    layout = recipe.get("update_layout", "shared")  # what `auto` takes on a GPU
    assert setup.update_layout == layout
    assert setup.is_packed == (layout in ("packed", "shared"))
    assert (setup.max_tokens_per_micro_batch is not None) == setup.is_packed
    assert (setup.critic is None) == (recipe.get("trainer", "grpo") != "ppo")


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: "/".join(path.parts[-3:]))
def test_a_recipe_for_gpus_leaves_to_auto_what_auto_would_take(path, model, known_shape, tmp_path):
    """Whatever it says about the update's rows is something else."""
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = ("update_layout", "max_tokens_per_micro_batch")
    said = {name: recipe.pop(name) for name in names if name in recipe}
    launch = ZERO_2 if "8 GPUs" in path.read_text(encoding="utf-8").splitlines()[0] else []
    by_auto = setup_of(model, "--config", write_recipe(tmp_path, **recipe | {"model_name_or_path": model}), *launch)
    for name, value in said.items():
        assert value != getattr(by_auto, name), f"remove {name} from {path}"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_it_reads_every_accelerate_configuration(path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    launch = read_accelerate_config(str(path))
    assert launch["zero_stage"] == values.get("deepspeed_config", {}).get("zero_stage", 0)
    assert launch["num_processes"] == values["num_processes"]
    assert launch["is_fsdp"] == ("fsdp2" in path.stem)
    assert launch["offload_optimizer"] == launch["offload_parameters"] == path.stem.endswith("_offload")


FEW, ZERO_2 = ["--per_device_train_batch_size", "4"], ["--accelerate_config", str(CONFIGS / "zero2.yaml")]
PPO, LORA, WITHOUT_16_BITS = ["--trainer", "ppo"], ["--use_peft"], ["--bf16", "false"]


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        (FEW, "generation_batch_rows", 4),
        ([*FEW, "--updates_per_rollout", "3"], "generation_batch_rows", 12),
        ([*FEW, "--prompts_per_rollout", "6", "--num_processes", "2"], "generation_batch_rows", 24),
        ([*FEW, "--prompts_per_rollout", "6", *PPO], "generation_batch_rows", 6),
        ([*FEW, "--steps_per_generation", "2"], "generation_batch_rows", 8),
        (ZERO_2, "num_processes", 8),
        ([*ZERO_2, "--num_processes", "4"], "num_processes", 4),
        ([], "num_processes", 1),
        ([], "critic", None),
        (PPO, "critic", "model"),
        ([*PPO, *LORA], "critic", "adapter"),
        ([*PPO, *LORA, "--critic", "head"], "critic", "head"),
        (WITHOUT_16_BITS, "mixed_precision", False),
        ([], "mixed_precision", True),
        ([*WITHOUT_16_BITS, "--fp16", "true"], "mixed_precision", True),
        ([*WITHOUT_16_BITS, "--accelerate_config", str(CONFIGS / "ddp.yaml")], "mixed_precision", True),
        (["--use_vllm", "--vllm_mode", "server"], "vllm_mode", "server"),
        ([], "needs_masks", True),
        (["--attn_implementation", "flash_attention_2"], "needs_masks", False),
        (["--dtype", "auto"], "dtype", "bfloat16"),  # the checkpoint's
        (["--max_completion_length", "90000"], "row_tokens", 32_768),  # no context is longer than the model's
    ],
)
def test_what_the_estimate_depends_on_is_read_as_train_reads_it(model, known_shape, options, name, expected):
    assert getattr(setup_of(model, *options), name) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("shared", 32_768)),
        (["--gpu_memory_gb", "8"], ("shared", 12_288)),
        (["--gpu_memory_gb", "1"], ("shared", 1024)),
        (["--max_tokens_per_micro_batch", "null"], ("shared", None)),
        (["--max_tokens_per_micro_batch", "5000"], ("shared", 5000)),
        (["--update_layout", "packed"], ("packed", 32_768)),
        (["--update_layout", "padded"], ("padded", None)),
        (ZERO_2, ("grouped", None)),  # the model reaches its GPU too late to be tried
        ([*ZERO_2, "--update_layout", "shared"], ("shared", 32_768)),
        ([*ZERO_2, "--max_tokens_per_micro_batch", "5000"], ("shared", 5000)),
    ],
)
def test_auto_is_what_it_would_be_on_such_a_gpu(model, known_shape, options, expected):
    setup = setup_of(model, *options)
    assert (setup.update_layout, setup.max_tokens_per_micro_batch) == expected


def test_what_auto_takes_and_checkpointing_that_is_not_needed_are_printed(model, known_shape, capsys):
    assert run(["--model_name_or_path", model, "--gpu_memory_gb", "800"]) == 0
    printed = capsys.readouterr().out
    assert "update_layout: shared, max_tokens_per_micro_batch: 32,768\n" in printed
    assert "It would fit with gradient_checkpointing: false as well" in printed
    run(["--model_name_or_path", model, "--gpu_memory_gb", "8"])
    assert "gradient_checkpointing: false" not in capsys.readouterr().out


def test_a_model_that_fits_is_said_to_fit(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    files = {path.stem: str(path) for path in CONFIGS.glob("zero3*.yaml")}
    assert run(["--model_name_or_path", model, "--accelerate_config", files["zero3_offload"]]) == 0
    assert "Adam" not in capsys.readouterr().out
    assert run(["--model_name_or_path", model, "--accelerate_config", files["zero3"], "--gpu_memory_gb", "80"]) == 0
    printed = capsys.readouterr().out
    assert "8 process(es)" in printed
    assert re.search(r"weights +1\.77 ", printed) and re.search(
        r"policy: Adam +10\.64 ", printed
    )  # 7.616e9 x 2 or 12 / 8
    assert "\nfits: " in printed


def test_a_model_that_does_not_fit_ends_with_what_would_help(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["--model_name_or_path", model, "--gpu_memory_gb", "80", "--num_processes", "8"]) == 1
    *_, changes = capsys.readouterr().out.partition("\ndoes not fit: ")
    assert -1 < changes.index("accelerate_config: zero3: ") < changes.index("accelerate_config: zero1: ")


def test_a_recipe_and_options_read_the_same_through_the_console_script(model, tmp_path, capsys):
    recipe = write_recipe(tmp_path, model_name_or_path=model, use_peft=True, lora_r=8, gpu_memory_gb=80.0, env="x")
    assert main(["memory", "--config", recipe]) == 0
    assert "policy: adapter" in capsys.readouterr().out


def test_the_pages_give_the_figure_of_the_command_that_stands_beside_it(model, capsys):
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    section = results.partition("## Computed: memory of one GPU\n")[2].partition("\n## ")[0]
    command = section.strip().partition("\n\n")[0].replace("\\\n", " ")
    for name, value in {"MODEL": model, "SHARE": "0.4", "LENGTH": "4096", "CARD": "80"}.items():
        command = command.replace(f" {name}", f" {value}")
    assert main(command.split()[1:]) == 0
    (peak,) = re.findall(r"^fits: ([\d.]+) of 80 GiB", capsys.readouterr().out, flags=re.MULTILINE)
    for page in ("README.md", "benchmarks/RESULTS.md", "docs/hardware.md"):
        rows = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        found = [
            row for row in rows if "80 GB" in row and "7B" in row and (page != "docs/hardware.md" or "LoRA" in row)
        ]
        assert len(found) == 1 and f" {peak} GiB |" in found[0], (page, peak, found)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], "--model_name_or_path: not set"),
        (["--model_name_or_path", "/nowhere/at/all"], "model_name_or_path='/nowhere/at/all'"),
        (["--optim", "sgd"], "optim='sgd'"),
        (["--accelerate_config", "none.yaml"], "--accelerate_config none.yaml"),
        (["--zero_stage", "2"], "--zero_stage"),
    ],
)
def test_a_mistake_is_refused(model, options, names, refusal):
    given = [] if "--model_name_or_path" in " ".join([*options, names]) else ["--model_name_or_path", model]
    assert names in refusal("memory", *given, *options)


def test_a_model_without_attention_is_not_estimated(tmp_path, refusal):
    MambaConfig().save_pretrained(tmp_path)
    assert "not estimated ('MambaConfig' object" in refusal("memory", "--model_name_or_path", str(tmp_path))


@pytest.mark.parametrize("kind", ["FSDP", "MEGATRON_LM"])
def test_a_method_that_is_not_estimated_is_refused(kind, tmp_path, model, refusal):
    path = write_recipe(tmp_path, distributed_type=kind)  # without fsdp_version: the first
    message = refusal("memory", "--model_name_or_path", model, "--accelerate_config", path)
    assert "accelerate_config=" in message and kind in message
