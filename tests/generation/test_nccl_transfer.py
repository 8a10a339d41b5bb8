"""Weights over NCCL: vLLM's real communicator between processes, with a library that moves bytes as NCCL would.

Not covered: NCCL itself and the streams of a GPU (`tests/fake_nccl.py`).
"""

import inspect
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agent_r1_trl.generation import GenerationError, VLLMServerGenerator
from agent_r1_trl.generation.vllm import server as server_module
from agent_r1_trl.generation.vllm import weight_transfer
from agent_r1_trl.generation.vllm.server_routes import rpc
from agent_r1_trl.generation.vllm.settings import ServerSettings
from agent_r1_trl.generation.vllm.weight_transfer import describe_gpu, reason_against
from tests import fake_nccl
from tests.fake_nccl import FakeNCCLLibrary, digest
from tests.fake_vllm import FakeServer
from tests.generation.test_server_faults import generator_on, policy, turns
from tests.servers import ROOT, vllm_server

CPU = torch.device("cpu")
GPU = {"nccl": "2.27.3", "gpu": "a"}


# -------------------------------------------------------------------- who can be in a group


@pytest.mark.parametrize(
    ("trainer", "workers", "reason"),
    [
        (None, [GPU], "the trainer has no GPU"),
        (GPU, [{**GPU, "gpu": "b"}, None], "the server runs on no GPU"),
        (GPU, [{"nccl": "2.26.0", "gpu": "b"}], "different versions of NCCL (2.26.0, 2.27.3)"),
        (GPU, [{**GPU, "gpu": "b"}, {**GPU, "gpu": "a"}], "share a GPU"),
        (GPU, [{**GPU, "gpu": "b"}, {**GPU, "gpu": "c"}], None),
    ],
)
def test_nccl_is_for_gpus_of_their_own_with_one_version(trainer, workers, reason):
    found = reason_against(trainer, workers)
    assert (found is None) if reason is None else (reason in found)


def test_a_cpu_has_no_nccl():
    assert describe_gpu(CPU) is None


class ClosedAtOnce(weight_transfer.NCCLGroup):
    """Closed when a broadcast's thread starts."""

    def _broadcast(self, tensors):
        self.close()
        super()._broadcast(tensors)


@pytest.mark.parametrize("ending", ["hangs", "is closed", "is closed at once", "fails"])
def test_a_broadcast_that_hangs_or_fails_ends_and_closes_the_group(ending):
    """Closed from outside is what happens when a request to the same server fails."""
    aborted, freed = [], threading.Event()

    def broadcast(tensor, src, stream):
        if ending == "fails":
            raise RuntimeError("NCCL error: unhandled cuda error")
        freed.wait(20)

    library = SimpleNamespace(ncclCommAbort=aborted.append, ncclCommDestroy=None)
    kind = ClosedAtOnce if ending == "is closed at once" else weight_transfer.NCCLGroup
    group = kind(0, 2, CPU, timeout_s=0.3 if ending == "hangs" else 20)
    group._communicator = SimpleNamespace(nccl=library, comm="group", broadcast=broadcast)
    closing = threading.Timer(0.2, group.close)
    if ending == "is closed":
        closing.start()
    start = time.monotonic()
    with pytest.raises(weight_transfer.GroupError, match="unhandled cuda" if ending == "fails" else "gone, or took"):
        group.broadcast([torch.zeros(3)])
    assert time.monotonic() - start < 5
    freed.set()
    group.close()
    if ending == "is closed":
        closing.join()
    assert aborted == ["group"], "once"
    with pytest.raises(weight_transfer.GroupError):
        group.broadcast([torch.zeros(3)])


# -------------------------------------------------------------------- the real communicator

WEIGHTS = {
    "embed": torch.randn(3000, 40),
    "norm": torch.randn(64).bfloat16(),
    "scale": torch.tensor(2.5),
    "odd": torch.randn(7, 3).half(),
    "head": torch.randn(300, 40),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture
def nccl(monkeypatch):
    """This process, the trainer's, uses vLLM's communicator with the stand-in for the library."""
    pytest.importorskip("vllm")
    fake_nccl.install(monkeypatch.setattr, server_module)
    for name, value in {"broadcasts": [], "refuses": False, "num_left": None}.items():
        monkeypatch.setattr(FakeNCCLLibrary, name, value)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_stand_in_has_the_signatures_of_vllms_library():
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclDataTypeEnum, ncclUniqueId

    ours = {name: value for name, value in vars(FakeNCCLLibrary).items() if inspect.isfunction(value)}
    for name in ours.keys() - {"__init__"}:
        theirs = getattr(NCCLLibrary, name)
        assert [*inspect.signature(theirs).parameters] == [*inspect.signature(ours[name]).parameters], name
    assert ncclDataTypeEnum.from_torch(torch.uint8) == 1
    assert len(bytes(ncclUniqueId())) == fake_nccl.NUM_BYTES
    assert [*inspect.signature(PyNcclCommunicator).parameters][:2] == ["group", "device"]
    assert [*inspect.signature(PyNcclCommunicator.broadcast).parameters] == ["self", "tensor", "src", "stream"]


@pytest.mark.vllm
@pytest.mark.slow
def test_every_member_gets_every_tensor_bit_for_bit(nccl):
    first, found = weight_transfer.NCCLGroup(0, 3, CPU, timeout_s=30), {}

    def receive(rank):
        group = weight_transfer.NCCLGroup(rank, 3, CPU, timeout_s=30)
        group.meet(first.number.result(30))
        tensors = {name: torch.empty_like(value) for name, value in WEIGHTS.items()}
        group.broadcast([*tensors.values()])
        group.close()
        found[rank] = digest(tensors.items())

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    [thread.start() for thread in threads]
    first.meet()
    first.broadcast([*WEIGHTS.values()])
    [thread.join(30) for thread in threads]
    first.close()
    assert found == dict.fromkeys((1, 2), digest(WEIGHTS.items()))


class GPUServer(FakeServer):
    """Its one worker has a GPU of its own; `dies` after so many loads, without a word."""

    dies = None
    group = None

    def rpc_hello(self, path=None):
        return super().rpc_hello(path) | {"gpu": {"nccl": "2.29.6", "gpu": self.url}}

    def rpc_begin(self, name, group):
        self.group = None
        if group is not None:
            joined = weight_transfer.NCCLGroup(1, group["size"], CPU, timeout_s=20)
            try:
                joined.meet(bytes.fromhex(group["number"]))
            except weight_transfer.GroupError as error:
                return {"rank": 0, "error": f"GroupError: {error}"}
            self.group = joined
        return super().rpc_begin(name, group)

    def rpc_load(self, name, entries, file):
        if self.dies == 0:
            self.kill()
            return {"rank": 0}
        self.dies = None if self.dies is None else self.dies - 1
        if file is not None:
            return super().rpc_load(name, entries, file)
        assert self.group is not None
        values = {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, dtype, shape in entries}
        try:
            self.group.broadcast([*values.values()])
        except weight_transfer.GroupError as error:
            return {"rank": 0, "error": f"GroupError: {error}"}
        self.sums |= {key: float(value.sum()) for key, value in values.items()}
        return {"rank": 0}


@pytest.fixture
def drained(monkeypatch):
    """Says, for each sync, whether all weights were asked for, as the other ranks do; each is a chunk of its own."""
    seen, real = [], server_module.policy_weights

    def noted(*arguments, **options):
        seen.append(False)
        yield from real(*arguments, **options)
        seen[-1] = True

    monkeypatch.setattr(server_module, "policy_weights", noted)
    monkeypatch.setattr(weight_transfer, "CHUNK_BYTES", 1)
    return seen


def test_of_a_server_without_a_gpu_only_the_folder_is_used_and_nothing_stays_there(tmp_path, drained):
    with FakeServer() as server, generator_on(server, weights_dir=tmp_path) as generator:
        generator.sync(policy(20))
        assert turns(generator, 1) == [20]
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert drained == [True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["auto", "folder"])
def test_a_server_that_neither_nccl_nor_the_folder_reaches_is_refused(tmp_path, way):
    with FakeServer() as server, generator_on(server, weights_dir=tmp_path, weight_transfer=way) as generator:
        server.machine = tmp_path
        with pytest.raises(GenerationError, match=r"servers\.weight_transfer") as refused:
            generator.sync(policy(20))
    assert str(tmp_path) in str(refused.value) and server.url in str(refused.value)


def test_a_folder_that_cannot_be_written_ends_the_sync_with_the_cause_for_all_ranks(tmp_path, drained, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with (
        FakeServer() as server,
        generator_on(server, weights_dir=tmp_path) as generator,
        pytest.raises(GenerationError, match="No space left on device"),
    ):
        generator.sync(policy(20))
    assert drained == [True]


@pytest.mark.vllm
@pytest.mark.slow
def test_weights_go_over_nccl_and_a_server_that_dies_harms_no_other(nccl, drained, tmp_path):
    with (
        GPUServer() as dying,
        GPUServer() as other,
        FakeServer() as cpu,
        generator_on(dying, other, cpu, weights_dir=tmp_path) as generator,
    ):
        generator.sync(policy(20))
        assert turns(generator, 6) == [20] * 6
        assert len(FakeNCCLLibrary.broadcasts) == 8, "two weights, two groups of two members"
        dying.dies = 1
        generator.sync(policy(21))
        assert turns(generator, 6) == [21] * 6
        assert generator.metrics()["sampling/servers_excluded"] == 1
    assert drained == [True, True]


@pytest.mark.vllm
@pytest.mark.slow
def test_an_error_of_nccl_is_that_of_its_server_alone_and_all_weights_are_gathered_to_the_end(
    nccl, drained, tmp_path, caplog
):
    with (
        GPUServer() as server,
        FakeServer() as cpu,
        generator_on(server, cpu, weights_dir=tmp_path, sync_timeout=20) as generator,
    ):
        FakeNCCLLibrary.num_left = 1
        generator.sync(policy(20))
        assert "unhandled cuda error" in caplog.text and server.url in caplog.text
        assert turns(generator, 2) == [20] * 2
        assert generator.metrics()["sampling/servers_excluded"] == 1
        FakeNCCLLibrary.num_left = None
        generator.sync(policy(21))
        assert server.value == 21, "with what it missed"
    with GPUServer() as server, generator_on(server, weights_dir=tmp_path, sync_timeout=20) as generator:
        FakeNCCLLibrary.num_left = 0
        with pytest.raises(GenerationError, match="unhandled cuda error"):
            generator.sync(policy(20))
    assert drained == [True, True, True]


@pytest.mark.vllm
@pytest.mark.slow
def test_where_nccl_fails_when_the_members_meet_the_error_says_how_to_do_without(nccl, drained, tmp_path):
    FakeNCCLLibrary.refuses = True
    with (
        GPUServer() as server,
        generator_on(server, weights_dir=tmp_path) as generator,
        pytest.raises(GenerationError, match=r"unhandled system error.*servers.weight_transfer='folder'"),
    ):
        generator.sync(policy(20))
    assert FakeNCCLLibrary.broadcasts == [] and drained == [True]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_trainer_that_must_use_nccl_says_what_keeps_it_from_that(nccl, tmp_path):
    with FakeServer() as server:
        with (
            generator_on(server, weights_dir=tmp_path, weight_transfer="nccl") as generator,
            pytest.raises(GenerationError, match="runs on no GPU") as refused,
        ):
            generator.sync(policy(20))
        assert "servers.weight_transfer to 'auto' or 'folder'" in str(refused.value)
        for fix in ("folder", "auto"):
            with generator_on(server, weights_dir=tmp_path, weight_transfer=fix) as generator:
                generator.sync(policy(20))
        assert server.weights is not None


# -------------------------------------------------------------------- chunks


def test_small_weights_travel_together_and_a_large_one_is_read_where_it_lies(monkeypatch):
    monkeypatch.setattr(weight_transfer, "CHUNK_BYTES", 64)
    large = torch.arange(100.0)
    weights = [("a", torch.ones(3)), ("b", torch.ones(5).bfloat16()), ("c", large), ("d", torch.arange(12.0)[::2])]
    found = list(weight_transfer.chunks(iter(weights), CPU))
    assert [list(chunk) for chunk in found] == [["a", "b"], ["c"], ["d"]]
    assert found[1]["c"].data_ptr() == large.data_ptr()
    assert all(value.is_contiguous() for chunk in found for value in chunk.values())
    assert digest(item for chunk in found for item in chunk.items()) == digest(weights)


# -------------------------------------------------------------------- a real server, tensor parallel


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of a server whose two workers each hold a half of every layer."""
    from tests.generation.test_vllm import random_policy

    folder = tmp_path_factory.mktemp("server")
    random_policy(1, tie_word_embeddings=True, num_key_value_heads=2).save_pretrained(folder / "model")
    options = ["--skip-tokenizer-init", "--tensor-parallel-size", "2"]
    worker = ["--worker-extension-cls", "tests.fake_nccl_worker.FakeNCCLWorker"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with vllm_server(folder / "model", folder, *options, *worker, environment=path) as address:
        yield address


@pytest.mark.vllm
@pytest.mark.release
def test_both_workers_of_a_tensor_parallel_server_get_their_halves_of_a_merged_adapter(url, nccl):
    """With tied embeddings, which are sent once."""
    from tests.generation.test_vllm import STOP_ID, change, gap, random_policy

    settings = ServerSettings(weight_transfer="nccl")
    generator = VLLMServerGenerator([url], stop_token_ids=[STOP_ID], settings=settings)
    base = random_policy(tie_word_embeddings=True, num_key_value_heads=2)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])).eval()
    size = sum(parameter.nbytes for name, parameter in model.named_parameters() if "lora_" not in name)
    try:
        for seed in (3, 4):
            change(model, seed)
            generator.sync(model)
            assert gap(generator, model) < 1e-4
        workers = generator._http.run(rpc(generator._http, url, "agent_r1_broadcasts", timeout_s=30))
    finally:
        generator.close()
    assert sorted(worker["rank"] for worker in workers) == [0, 1]
    for worker in workers:
        assert size < worker["bytes"] < 2 * size, "all weights at the first sync, then those with an adapter"
