"""The processes and devices of a launch: whether they are those that the user asked for, and defaults that suit them.

With fewer processes a run silently trains on a smaller batch than the recipe says. `accelerate launch` starts a single
process for a CPU configuration of several, and for `--num_processes 8` with a configuration of type 'NO'.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from agent_r1_trl.cli.errors import UsageError

_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables in which torchrun, DeepSpeed and MPI launchers tell each process how many there are."""


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse the single process of an `accelerate launch` that was asked for several.

    Accelerate's plain launcher exports the precision to every script and MASTER_ADDR only where several processes were
    asked for; it starts one either way.

    Args:
        environment: variables of this process, as the launcher set them.

    Raises:
        UsageError: one process runs where several were asked for.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment
    if launched and not any(name in environment for name in _COUNTS):
        raise UsageError(
            "num_processes: accelerate launch was told to start several processes and started 1; its CPU mode and a "
            "configuration with distributed_type 'NO' do that. On a CPU run torchrun --nproc_per_node 2 -m "
            "agent_r1_trl.cli.train ..., or use recipes/accelerate_configs/cpu_2proc.yaml; on GPUs "
            "recipes/accelerate_configs/ddp.yaml. If one process is what you want, unset MASTER_ADDR."
        )


def check_num_processes(environment: Mapping[str, str], running: int, expected: int | None) -> None:
    """Refuse a run with another number of processes than the launcher announced or the recipe expects.

    Args:
        environment: variables of this process.
        running: number of processes that train together.
        expected: `num_processes_expected` of the recipe; None: any number.

    Raises:
        UsageError: the numbers differ.
    """
    announced = int(environment.get("WORLD_SIZE") or running)
    if announced != running:
        raise UsageError(
            f"WORLD_SIZE={announced}: the launcher announced {announced} processes and {running} train together. "
            "Start through accelerate launch or torchrun, and leave RANK, WORLD_SIZE and MASTER_ADDR to them."
        )
    if expected is not None and expected != running:
        raise UsageError(
            f"num_processes_expected={expected}: {running} process(es) started, so a step would train on another "
            f"number of trajectories than the recipe intends. Launch with --num_processes {expected}, or change "
            "num_processes_expected (leave it out for any number)."
        )


def device_defaults() -> dict[str, Any]:
    """Change TRL's defaults for a recent GPU: no bf16 on an older one, and no pinned memory without any."""
    import torch

    if not torch.cuda.is_available():
        return {"bf16": False, "dataloader_pin_memory": False}
    return {} if torch.cuda.is_bf16_supported() else {"bf16": False}


def use_one_gpu() -> None:
    """Hide all GPUs but the first from a plain `python -m` process, for which transformers would use DataParallel."""
    if "WORLD_SIZE" in os.environ or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        print(
            f"This process uses the first of {count} GPUs. To use all of them: accelerate launch --config_file "
            "recipes/accelerate_configs/ddp.yaml -m agent_r1_trl.cli.train ..."
        )
