"""`doctor --run` under a launcher: process 0 reports, and an error of either is in it."""

import re
import subprocess
import sys

import pytest

from tests.distributed.launch import launch
from tests.features.doctor.test_doctor_run import CHECKS, read_table

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["ddp", "zero2"])
def test_the_first_of_two_processes_reports_for_both(tmp_path, kind):
    launch(kind, "tests.distributed.doctor", tmp_path)
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert sorted(re.findall(r"rank \d: exit code.* \d", log)) == [
        "rank 0: exit code 0", "rank 0: exit code of a broken one 1",
        "rank 1: exit code 0", "rank 1: exit code of a broken one 1",
    ]  # fmt: skip
    assert len(re.findall(r"verdict +┃ check", log)) == 2, "process 0 reports, once each time"
    first, second = log.split("rank 0: exit code 0")
    found = read_table(first)
    assert set(found) == set(CHECKS)
    assert "4 trajectories" in found["speed"][1] and found["numbers"][0] == "ok"
    verdict, words = read_table(second)["trial"]
    assert verdict == "error" and "KeyError: 'gold'" in words


def test_torchrun_takes_the_module_of_the_trial(tmp_path):
    """It would take `doctor --run` for its own `--run-path`."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    program += ["-m", "agent_r1_trl.features.doctor.run_command", "--config", "nowhere.yaml"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "nowhere.yaml" in done.stderr and "ambiguous" not in done.stderr
