"""The accelerate configurations load, agree with each other, and too few processes are noticed.

Covered: every file of recipes/accelerate_configs, its line in the README there, and what `train` says when a launcher
starts fewer processes than asked. Not covered: training under each of them (the distributed tests do that on two CPU
processes, and on two machines of a kind); zero3_offload and fsdp2_offload are read, never run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin

from agent_r1_trl.cli import train
from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.train import check_num_processes
from agent_r1_trl.trainers.launcher import asked_of_accelerate
from tests.trainers.test_sharding import on_gpus

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
STAGES = {
    "single_gpu": None,
    "ddp": None,
    "zero1": 1,
    "zero2": 2,
    "zero3": 3,
    "zero3_offload": 3,
    "fsdp2": None,
    "fsdp2_offload": None,
    "multi_node_zero3": 3,
    "multi_node_fsdp2": None,
    "cpu_2proc": 2,
    "cpu_2proc_zero3": 3,
}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_the_files_are_those_that_are_documented():
    assert {path.stem for path in FILES} == set(STAGES)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{path.name}` |" in readme for path in FILES)


@each_file
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    has_two_machines = path.stem.startswith("multi_node_")
    kinds = {"single_gpu": "NO", "ddp": "MULTI_GPU"}
    kind = "FSDP" if "fsdp2" in path.stem else kinds.get(path.stem, "DEEPSPEED")
    assert config.distributed_type == kind
    assert config.use_cpu == path.stem.startswith("cpu_")
    on_one_machine = 1 if path.stem == "single_gpu" else 2 if config.use_cpu else 8
    assert config.num_processes == (16 if has_two_machines else on_one_machine)
    assert config.num_machines == (2 if has_two_machines else 1)
    assert (config.main_process_port is not None) == has_two_machines
    assert config.mixed_precision == ("no" if config.use_cpu or path.stem == "single_gpu" else "bf16")


@each_file
def test_its_deepspeed_section_fits_its_name(path):
    section = yaml.safe_load(path.read_text(encoding="utf-8")).get("deepspeed_config")
    if STAGES[path.stem] is None:
        assert section is None
        return
    assert section["zero_stage"] == STAGES[path.stem]
    place = "cpu" if path.stem.endswith("_offload") else "none"
    assert (section["offload_optimizer_device"], section["offload_param_device"]) == (place, place)
    # Without it a checkpoint of a ZeRO-3 run holds shards that only DeepSpeed reads.
    assert section.get("zero3_save_16bit_model", False) == (STAGES[path.stem] == 3)
    assert "deepspeed_config_file" not in section


def test_the_gpu_configurations_differ_in_what_they_split_and_in_nothing_else():
    common = {}
    for name in ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2", "fsdp2_offload"):
        values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        for key in ("distributed_type", "deepspeed_config", "fsdp_config", "gpu_ids"):
            values.pop(key, None)
        common[name] = values
    assert all(values == common["ddp"] for values in common.values()), common


@pytest.mark.parametrize("method", ["zero3", "fsdp2"])
def test_two_machines_are_configured_as_one_but_for_their_number(method):
    one, two = (yaml.safe_load((FOLDER / f"{name}{method}.yaml").read_text("utf-8")) for name in ("", "multi_node_"))
    of_two = {"num_machines": 2, "num_processes": 16, "main_process_port": 29500}
    launcher = {"deepspeed_multinode_launcher": "standard"}  # ours is started on each machine; DeepSpeed's uses ssh
    assert two == one | of_two | (
        {"deepspeed_config": one["deepspeed_config"] | launcher} if method == "zero3" else {}
    )


@pytest.mark.parametrize(("running", "expected"), [(1, None), (2, 2), (4, None)])
def test_the_expected_number_of_processes_passes(running, expected):
    check_num_processes({"WORLD_SIZE": str(running)}, running, expected)


def test_another_number_than_the_recipe_expects_is_refused():
    with pytest.raises(UsageError, match=r"num_processes_expected=8.*torchrun --nproc_per_node 8 "):
        check_num_processes({"WORLD_SIZE": "2"}, 2, 8)


def test_processes_that_do_not_train_together_are_refused():
    with pytest.raises(UsageError, match="WORLD_SIZE=2"):
        check_num_processes({"WORLD_SIZE": "2"}, 1, None)


FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "num_processes": 1, "num_machines": 1}


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_offload", "multi_node_fsdp2"])
def test_what_the_fsdp2_files_set_is_supported(name, monkeypatch):
    section = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))["fsdp_config"]
    assert section["fsdp_offload_params"] == (name == "fsdp2_offload")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for key, value in section.items():
        monkeypatch.setenv(key.upper(), str(value))
    on_gpus().check_supported()
    assert FullyShardedDataParallelPlugin().reshard_after_forward is True  # it reads the same variables


@pytest.mark.release
def test_fsdp_in_a_configuration_is_refused_on_a_cpu_with_its_source(tmp_path):
    """There accelerate would leave it out without a word."""
    recipe = {
        "model_name_or_path": "none",
        "env": "frozen_lake",
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "max_steps": 1,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"bf16": False}), encoding="utf-8")
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(FSDP | {"mixed_precision": "no"}), encoding="utf-8")
    train = ["-m", "agent_r1_trl.cli.train", "--config", str(tmp_path / "recipe.yaml")]
    done = accelerate_launch("--config_file", str(tmp_path / "fsdp.yaml"), *train)
    assert done.returncode != 0
    assert "error: fsdp=True (ACCELERATE_USE_FSDP=true: accelerate launch sets it for `--use_fsdp`" in done.stderr
    assert "recipes/accelerate_configs/cpu_2proc_zero3.yaml" in done.stderr


def test_the_launchers_flag_arrives_as_that_variable():
    """And with `--cpu` it does not arrive at all, as docs/hardware.md says."""
    flags = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "1", "--num_machines", "1"]
    flags += ["--mixed_precision", "no", "--dynamo_backend", "no", "--no_python"]
    assert "ACCELERATE_USE_FSDP=true" in accelerate_launch(*flags, "env").stdout
    assert "ACCELERATE_USE_FSDP" not in accelerate_launch("--cpu", *flags, "env").stdout


def accelerate_launch(*arguments):
    """What `accelerate launch` with these arguments ends with."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "accelerate.commands.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


CPUS = {
    "distributed_type": "MULTI_CPU",
    "num_processes": 3,
    "num_machines": 1,
    "use_cpu": True,
    "mixed_precision": "no",
}
ONE_GPU = CPUS | {"distributed_type": "NO", "use_cpu": False}


@pytest.fixture
def configuration(tmp_path):
    """`configuration(values)` is the path of a file for `--config_file`."""

    def write(values):
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.release
def test_train_stops_where_accelerate_starts_fewer_processes_than_asked(tmp_path, configuration):
    """accelerate starts one process for several on a CPU, and tells it nothing of the others."""
    settings = {"model_name_or_path": "none", "env": "frozen_lake", "output_dir": str(tmp_path / "out")}
    settings |= {"use_cpu": True, "bf16": False, "max_steps": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = ["-m", "agent_r1_trl.cli.train", "--config", str(tmp_path / "recipe.yaml")]
    done = accelerate_launch("--config_file", configuration(CPUS), *command)
    assert done.returncode != 0
    assert "num_processes=3 was asked of accelerate launch, and it has started 1" in done.stderr
    assert "torchrun --nproc_per_node 3 -m agent_r1_trl.cli.train" in done.stderr


@pytest.mark.release
def test_the_number_is_found_wherever_the_launcher_was_given_it(tmp_path, configuration):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom agent_r1_trl.trainers.launcher import find_launch_problem\n"
        "print(find_launch_problem(os.environ, 1) or 'nothing')\n"
    )
    launches = [
        (["--cpu", "--num_processes", "2"], "num_processes=2 was asked"),
        (["--config_file", configuration(ONE_GPU)], "num_processes=3 was asked"),
        (["--cpu", "--num_processes", "1"], "nothing"),
    ]
    for flags, said in launches:
        done = accelerate_launch(*flags, str(script), "--num_processes", "9")
        assert done.stdout.startswith(said), (flags, done.stdout, done.stderr)


def test_the_numbers_asked_of_accelerate_are_read_as_it_reads_them(configuration):
    file = configuration(CPUS | {"num_processes": 6, "num_machines": 2})
    assert asked_of_accelerate(["--config_file", file, "train.py"]) == (6, 2)
    assert asked_of_accelerate(["--config_file", file, "--num_processes=4", "train.py"]) == (4, 2)
    assert asked_of_accelerate(["--cpu", "train.py", "--num_processes", "4"]) == (1, 1), "those are the script's"
    assert asked_of_accelerate(["--no_such_option", "train.py"]) == (1, 1)


def test_train_refuses_a_recipe_made_for_more_processes(tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    recipe = tmp_path / "recipe.yaml"
    settings = {"model_name_or_path": "none", "env": "frozen_lake", "output_dir": str(tmp_path), "use_cpu": True}
    settings["max_steps"] = 1
    recipe.write_text(yaml.safe_dump(settings | {"num_processes_expected": 2}), encoding="utf-8")
    with pytest.raises(UsageError, match="num_processes_expected=2"):
        train.run(["--config", str(recipe)])
