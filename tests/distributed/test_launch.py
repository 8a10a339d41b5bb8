"""The launches of the other tests cannot block, and leave nothing behind."""

import os
import time

import psutil
import pytest

from tests.distributed.launch import launch, remove_build_locks

pytestmark = pytest.mark.release


def test_a_launch_that_hangs_fails_and_its_processes_are_gone(tmp_path):
    with pytest.raises(AssertionError, match="still running after 30 s"):
        launch("ddp", "tests.distributed.hang", tmp_path, timeout_s=30)
    process_ids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(process_ids) == 2
    deadline = time.monotonic() + 10  # a process that was killed ends when it gets its turn
    while (alive := [item for item in process_ids if is_running(item)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []


def is_running(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_launch_leaves_no_lock_of_its_build(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "extension").mkdir()
    old, own = tmp_path / "lock", tmp_path / "extension" / "lock"
    old.touch(), own.touch()
    os.utime(old, (0, 0))
    remove_build_locks(time.time() - 60)
    assert old.exists() and not own.exists()


def test_a_worker_that_fails_is_reported_with_what_it_said(tmp_path):
    with pytest.raises(AssertionError, match="No module named"):
        launch("ddp", "tests.distributed.nothing", tmp_path)
