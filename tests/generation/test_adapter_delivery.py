"""Adapters reach servers that do not see the trainer's folder, and nothing but adapters is kept there."""

import base64
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agent_r1_trl.generation import GenerationError
from agent_r1_trl.generation.vllm import lora_files, server_sync
from agent_r1_trl.generation.vllm.lora_files import ADAPTER_FILES, forget_adapters, keep_adapter
from tests.fake_vllm import BASE, FakeServer
from tests.generation.helpers import tiny_model
from tests.generation.test_server_faults import generator_on, turns

FILES = {name: base64.b64encode(bytes([index, 1, 2])).decode() for index, name in enumerate(ADAPTER_FILES)}


def lora():
    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


@pytest.fixture
def machine(tmp_path):
    """A folder that only the server sees."""
    folder = tmp_path / "machine"
    folder.mkdir()
    return folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """This machine's temporary folder."""
    monkeypatch.setattr(lora_files.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


# -------------------------------------------------------------------- the trainer's side


def test_a_server_elsewhere_gets_the_same_adapter_as_one_that_sees_the_folder(tmp_path, machine):
    model = lora()
    with (
        FakeServer(adapters=True) as near,
        FakeServer(adapters=True) as far,
        generator_on(near, far, adapter_dir=tmp_path / "ours") as generator,
    ):
        far.machine = machine
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1)
            generator.sync(model)
            assert list(near.loaded.values()) == list(far.loaded.values())
            assert list(far.loaded.values()) != [BASE]
        assert near.kept == []
        (first, none), (second, old) = far.kept
        assert (none, old) == (None, first)
        assert {path.name for path in machine.iterdir()} == {first, second}
    assert "/collective_rpc" in far.calls


def test_a_server_elsewhere_that_was_restarted_is_sent_the_adapter_again(tmp_path, machine):
    with (
        FakeServer(adapters=True) as server,
        generator_on(server, adapter_dir=tmp_path / "ours", may_restore=True) as generator,
    ):
        server.machine = machine
        generator.sync(lora())
        generator.scores([3, 4, 5])
        (before,) = turns(generator, 1)
        assert before != BASE
        server.kill()
        for folder in machine.iterdir():  # as in a container that starts anew
            folder.rename(tmp_path / folder.name)
        threading.Timer(1.0, server.start).start()
        assert turns(generator, 2) == [before] * 2
        assert len(server.kept) == 2


def test_a_server_that_dies_while_it_is_sent_an_adapter_does_not_harm_the_others(tmp_path, machine, monkeypatch):
    with (
        FakeServer(adapters=True) as far,
        FakeServer(adapters=True) as near,
        generator_on(far, near, adapter_dir=tmp_path / "ours") as generator,
    ):
        far.machine = machine
        monkeypatch.setattr(far, "rpc_adapter", lambda *arguments: far.kill() or {})
        generator.sync(lora())
        assert len(near.loaded) == 1
        assert BASE not in turns(generator, 2)
        assert generator.metrics()["sampling/servers_left_out"] == 1


@pytest.mark.parametrize("others", ["/b", "/a"], ids=["not the same", "the same"])
def test_the_workers_of_a_server_must_keep_an_adapter_under_one_path(tmp_path, monkeypatch, others):
    rpc = server_sync.rpc

    async def with_two_workers(http, url, method, name, *arguments, **options):
        if method != "agent_r1_adapter":
            return await rpc(http, url, method, name, *arguments, **options)
        return [{"path": f"/a/{name}"}, {"path": f"{others}/{name}"}]

    monkeypatch.setattr(server_sync, "rpc", with_two_workers)
    paths = []

    async def load_adapter(http, url, name, path):
        paths.append(path)

    monkeypatch.setattr(server_sync, "load_adapter", load_adapter)
    with FakeServer(adapters=True) as server, generator_on(server, adapter_dir=tmp_path) as generator:
        server.machine = tmp_path
        if others == "/b":
            with pytest.raises(GenerationError, match="TMPDIR"):
                generator.sync(lora())
        else:
            generator.sync(lora())
            assert paths[0].startswith("/a/agent-r1-")


# -------------------------------------------------------------------- the server's side


def test_a_machine_keeps_the_new_adapter_and_the_one_that_is_served(temporary):
    for number, old in enumerate([None, "run-a-0", "run-a-1"]):
        path = keep_adapter(f"run-a-{number}", FILES, old=old)
    keep_adapter("run-b-0", FILES)
    assert {folder.name for folder in path.parent.iterdir()} == {"run-a-1", "run-a-2", "run-b-0"}
    assert [(path / name).read_bytes()[0] for name in ADAPTER_FILES] == [0, 1]
    assert path.parent.stat().st_mode & 0o777 == 0o700
    forget_adapters("run-a-2")
    assert {folder.name for folder in path.parent.iterdir()} == {"run-b-0"}


def test_two_workers_of_a_machine_keep_the_same_adapter(temporary):
    start, paths = threading.Barrier(2), []

    class Slow(dict):
        def items(self):
            start.wait(10)
            return super().items()

    threads = [threading.Thread(target=lambda: paths.append(keep_adapter("run-0", Slow(FILES)))) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert paths[0] == paths[1]
    assert [path.name for path in paths[0].parent.iterdir()] == ["run-0"]
    assert {path.name for path in paths[0].iterdir()} == set(ADAPTER_FILES)


@pytest.mark.parametrize("name", ["../run-1", "run", "/etc/run-1", "", "run-1/x-2"])
def test_nothing_is_written_outside_the_place_for_adapters(temporary, name):
    with pytest.raises(ValueError, match="no name of an adapter"):
        keep_adapter(name, FILES)
    with pytest.raises(ValueError, match="no file of an adapter"):
        keep_adapter("run-1", {"../x": FILES[ADAPTER_FILES[0]]})
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


def test_a_place_that_somebody_else_made_is_not_used(temporary):
    place = keep_adapter("run-1", FILES).parent
    forget_adapters("run-1")
    place.rmdir()
    (temporary / "theirs").mkdir()
    place.symlink_to(temporary / "theirs")
    with pytest.raises(PermissionError, match="TMPDIR"):
        keep_adapter("run-1", FILES)
