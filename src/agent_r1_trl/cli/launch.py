"""Did as many processes come up as the user asked for?

A run with fewer of them trains on another batch than the recipe says, without a word: `accelerate launch` starts a
single process for a CPU configuration of several, and for `--num_processes 8` with a configuration of type 'NO'.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1_trl.cli.errors import UsageError

_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""What torchrun, DeepSpeed and MPI launchers tell each process; accelerate reads them."""


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse the lone process of an `accelerate launch` that was asked for several.

    Accelerate's plain launcher exports its precision to every script, an address to meet at only for several
    processes, and starts one all the same.

    Args:
        environment: of this process, as the launcher left it.

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
    """Refuse a run of another size than launcher or recipe say.

    Args:
        environment: of this process.
        running: processes that train together.
        expected: the recipe's `num_processes_expected`; None: any number.

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
            f"num_processes_expected={expected}: {running} process(es) came up, so a step would see another number of "
            f"trajectories than the recipe means. Launch with --num_processes {expected}, or change "
            "num_processes_expected (leave it out for any number)."
        )
