"""Two machines train together, with a server on one of them; one is lost, and the other ends.

Covered: rendezvous, ZeRO-3 by `multi_node_zero3.yaml` and FSDP2 applied by hand over both machines, weights that reach
a server on the other one, checkpoints, and the end of the survivor, which waits for answers of the lost server: first
for that, then for the lost rank. Not covered: GPUs and NCCL; folders that the machines do not share.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from agent_r1_trl.environments import ToolEnv
from tests.distributed import fsdp2, machines
from tests.distributed.launch import ROOT
from tests.distributed.machines import two_machines
from tests.distributed.vllm_ranks import save_policy

pytestmark = pytest.mark.release

CONFIG = ROOT / "recipes" / "accelerate_configs" / "multi_node_zero3.yaml"
RANKS_PER_MACHINE = 1
"""Each costs a start."""
NUM_STEPS_BEFORE = 2
START_S, END_S = 600, 120
"""Time limits on a busy machine: until so many steps are done, and from the loss of a machine to the other's end."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TESTS_WITHOUT_VLLM": "1", "GLOO_SOCKET_IFNAME": machines.CABLE,
    "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # DeepSpeed builds its extension with ninja
}  # fmt: skip


class Env(ToolEnv):
    """Earns a number that its seed decides, whatever the policy says."""

    def seed(self, *, reset_seed, dynamics_seed):
        self.earned = float(dynamics_seed % 5)

    def outcome_reward(self, trajectory):
        return self.earned


@pytest.fixture
def both():
    """Two machines."""
    reason = machines.reason_against()
    if reason is not None:
        pytest.skip(f"two machines cannot be made here: {reason}")
    with two_machines() as made:
        yield made


def write_files(folder, url):
    """The tiny policy, the data, the recipe, and `multi_node_zero3.yaml` for CPUs."""
    save_policy(folder / "policy", seed=0)
    rows = [{"id": f"q{index}", "prompt": f"question {index}"} for index in range(64)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = {
        "model_name_or_path": str(folder / "policy"), "dtype": "float32", "env": f"{__name__}.Env",
        "dataset_name": str(folder / "data.jsonl"), "output_dir": str(folder / "run"),
        "max_tokens_per_turn": 8, "max_completion_length": 16, "max_turns": 1, "num_generations": 4,
        "per_device_train_batch_size": 4, "max_steps": 1000, "learning_rate": 0.01, "lr_scheduler_type": "constant",
        "use_vllm": True, "vllm_mode": "server", "servers.urls": [url],
        "servers.health_timeout": 5, "servers.retry_window": 5,
        "servers.max_logprob_gap": 1e9, "vllm_importance_sampling_correction": False,  # the stand-in is no policy
        "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "save_strategy": "steps", "save_steps": 1,
        "ddp_timeout": 30, "logging_steps": 1, "report_to": "none", "record_trajectories": "none",
        "num_processes_expected": 2 * RANKS_PER_MACHINE,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    assert config["num_machines"] == 2
    config |= {"use_cpu": True, "mixed_precision": "no", "num_processes": 2 * RANKS_PER_MACHINE}
    (folder / "two_machines.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def launch(kind, folder, machine, main):
    """The command of recipes/slurm/README.md; for FSDP2, which accelerate leaves out on CPUs, torchrun's."""
    if kind == "zero3":
        launcher = ["-m", "accelerate.commands.launch", "--config_file", folder / "two_machines.yaml"]
        launcher += ["--machine_rank", machine.rank, "--main_process_ip", main.address, "-m"]
    else:
        launcher = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", RANKS_PER_MACHINE]
        launcher += ["--node_rank", machine.rank, "--master_addr", main.address, "--master_port", 29500]
        launcher += ["-m", "tests.distributed.launch"]
    train = ["agent_r1_trl.cli.train", "--config", folder / "recipe.yaml"]
    environment = ENVIRONMENT | {fsdp2.ASKED: "1" if kind == "fsdp2" else ""}
    log = folder / f"machine-{machine.rank}.txt"
    return machine.start(log, sys.executable, *launcher, *train, **environment)


def wait_for(done, timeout_s, logs):
    deadline = time.monotonic() + timeout_s
    while not done():
        said = "\n\n".join(path.read_text(encoding="utf-8")[-5000:] for path in logs if path.exists())
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def sums_in(folder):
    path = folder / "sums"
    return [float(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


@pytest.mark.timeout(START_S + END_S + 120)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_two_machines_train_together_and_one_ends_when_the_other_is_lost(both, kind, tmp_path):
    logs = [tmp_path / f"machine-{rank}.txt" for rank in range(2)]
    far = both[1]
    far.start(tmp_path / "server.txt", sys.executable, "-m", "tests.distributed.far_server", far.address, tmp_path,
              NUM_STEPS_BEFORE, **ENVIRONMENT)  # fmt: skip
    wait_for((tmp_path / "url").exists, START_S, [tmp_path / "server.txt"])
    write_files(tmp_path, (tmp_path / "url").read_text(encoding="utf-8"))
    launchers = [launch(kind, tmp_path, machine, both[0]) for machine in both]

    def waits_for_an_answer():
        assert all(process.poll() is None for process in launchers), [path.read_text()[-5000:] for path in logs]
        held = tmp_path / "held"
        return held.exists() and both[0].address in held.read_text(encoding="utf-8").split()

    wait_for(waits_for_an_answer, START_S, logs)
    assert len(sums_in(tmp_path)) > NUM_STEPS_BEFORE
    both[1].lose()
    lost_at = time.monotonic()
    wait_for(lambda: launchers[0].poll() is not None, END_S, logs)
    print(f"the other machine ended {time.monotonic() - lost_at:.0f} s after the loss")
    assert launchers[0].returncode == 1
    said = logs[0].read_text(encoding="utf-8")
    assert "does not answer its health check" in said, said[-5000:]
    assert "Another rank is gone" in said and "resume_from_checkpoint: true" in said, said[-5000:]
    for step in range(1, NUM_STEPS_BEFORE + 1):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        assert (checkpoint / "pytorch_model_fsdp.bin").exists() == (kind == "fsdp2")
        weights = load_file(checkpoint / "model.safetensors")
        total = sum(float(value.sum()) for value in weights.values())
        assert sums_in(tmp_path)[step] == pytest.approx(total, abs=1e-2)
    assert len({round(total, 3) for total in sums_in(tmp_path)[: NUM_STEPS_BEFORE + 1]}) == NUM_STEPS_BEFORE + 1


def test_who_may_not_make_machines_is_told_why(monkeypatch):
    monkeypatch.setattr(machines.os, "geteuid", lambda: 1000)
    assert "need root" in machines.reason_against()
