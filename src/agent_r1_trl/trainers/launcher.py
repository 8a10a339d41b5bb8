"""The request to `accelerate launch`, beside the processes that it started.

Where the processes shall not run on several GPUs, `accelerate launch` starts one process whatever `--num_processes`
says, and no variable of that process has the number: it stands in the launcher's own command line and configuration.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_SET_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""A variable that `accelerate launch` sets for every process that it starts."""


def find_launch_problem(environment: Mapping[str, str], running: int) -> str:
    """The problem with how this process was started, and the command that works; "" if there is none.

    Args:
        environment: the variables of this process.
        running: number of processes that train together.
    """
    if running > 1 or _SET_BY_ACCELERATE not in environment:
        return ""
    command = launcher_command()
    if command is None:
        return ""
    processes, machines = asked_of_accelerate(command)
    if processes <= running:
        return ""
    torchrun = f"torchrun --nproc_per_node {-(-processes // machines)}"
    if machines > 1:
        torchrun += f" --nnodes {machines} --node_rank RANK --master_addr HOST --master_port PORT"
    return (
        f"num_processes={processes} was asked of accelerate launch, and it has started {running}, as it does for "
        "several processes on a CPU or beside a single GPU: a step would train on another number of trajectories. "
        f"Start them with {torchrun} -m agent_r1_trl.cli.train ... (a script: {torchrun} script.py ...), or set "
        "num_processes to 1."
    )


def launcher_command() -> list[str] | None:
    """The arguments of the `accelerate launch` above this process; None if there is none that can be read."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for parent in psutil.Process(os.getpid()).parents():
            words = parent.cmdline()
            for place, word in enumerate(words[:8]):  # python, its options, the program
                follows = words[place + 1 : place + 2]
                if Path(word).name in ("accelerate", "accelerate.exe") and follows == ["launch"]:
                    return words[place + 2 :]
                is_script = Path(word).name == "launch.py" and Path(word).parent.name == "commands"
                if is_script or Path(word).name == "accelerate-launch" or word == "accelerate.commands.launch":
                    return words[place + 1 :]
    return None


def asked_of_accelerate(command: Sequence[str]) -> tuple[int, int]:
    """The numbers of processes, over all machines, and of machines in the arguments of `accelerate launch`.

    As accelerate reads them: a configuration serves where the command line says nothing, and with `--cpu` only the
    one that the command line names. 1 where neither has a number.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        given, _ = launch_command_parser().parse_known_args(list(command))
    except SystemExit:  # another accelerate has started this process
        return 1, 1
    processes, machines = given.num_processes, given.num_machines
    by_default = default_config_file if Path(default_config_file).is_file() and not given.cpu else None
    file = given.config_file or by_default
    if file is not None:
        config = load_config_from_file(file)
        processes = getattr(config, "num_processes", None) if processes is None else processes
        machines = getattr(config, "num_machines", None) if machines is None else machines
    return max(processes or 1, 1), max(machines or 1, 1)
