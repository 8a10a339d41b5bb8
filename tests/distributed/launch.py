"""Processes of a worker module, started as a user would; none of them outlives its launch.

A worker that has done its work ends without Python's own finalisation (`end_well`): where a machine is overloaded, a
thread of gloo may still be about to free a tensor of the last collective operation, for which it wants the
interpreter's lock, and aborts the process ("terminate called without an active exception").
"""

import atexit
import gc
import importlib
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.distributed import fsdp2
from tests.effort import short
from tests.own_process import look_packages_up_once

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"zero2": "cpu_2proc.yaml", "zero3": "cpu_2proc_zero3.yaml"}
LAUNCHES = short(("ddp", *CONFIGS, "fsdp2"), "ddp", release=["zero3", "fsdp2"])
TIMEOUT_S = 780
"""Of a launch: DeepSpeed compiles for a minute when it is used for the first time."""


def launch(kind, module, output_dir, timeout_s=TIMEOUT_S, *, num_processes=2, needs_vllm=False):
    """Run `python -m module output_dir` in processes: `ddp`, `fsdp2` by torchrun, the others by accelerate."""
    program = ["-m", __name__, module, str(output_dir)]
    if kind in ("ddp", "fsdp2"):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", num_processes, *program]
    else:
        config = ROOT / "recipes" / "accelerate_configs" / CONFIGS[kind]
        command = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", free_port()]
        command += ["--num_processes", num_processes, *program]
    log, started_at = Path(output_dir) / "log.txt", time.time()
    bin_dir = str(Path(sys.executable).parent)  # DeepSpeed builds its extension with ninja
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TESTS_WITHOUT_VLLM": "" if needs_vllm else "1",
                fsdp2.ASKED: "1" if kind == "fsdp2" else "",
                "PATH": os.pathsep.join([bin_dir, os.environ["PATH"]]),
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            },
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        return_code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return_code = f"still running after {timeout_s} s"
    finally:
        if kill_tree(process):
            remove_build_locks(started_at)
    assert return_code == 0, f"{kind}: {return_code}\n{log.read_text(encoding='utf-8')[-6000:]}"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def kill_tree(process):
    """Kill the launcher and its workers, which lead sessions of their own; whether any of them still ran."""
    if process.poll() is not None:
        return False
    workers = psutil.Process(process.pid).children(recursive=True)
    for member in (process, *workers):
        member.kill()
    process.wait()
    return True


def remove_build_locks(since):
    """Remove what a killed build of DeepSpeed's extension leaves behind, at which every later launch would wait."""
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in cache.glob("**/lock"):
        if lock.stat().st_mtime >= since:
            lock.unlink(missing_ok=True)


def end_well():
    """End this process with exit code 0, after what it promised to do at its exit."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def set_imports_aside(module):
    """Load what a module loads, and have no collection visit it: accelerate makes two in each training."""
    importlib.import_module(module)
    del sys.modules[module]
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    del sys.argv[0]
    look_packages_up_once()
    if fsdp2.is_asked_for():
        fsdp2.use_fsdp2()
    set_imports_aside(sys.argv[0])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    end_well()
