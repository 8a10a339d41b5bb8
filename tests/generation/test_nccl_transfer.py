"""Weights over NCCL: vLLM's real communicator between processes, with a library that moves bytes as NCCL would.

Not covered: NCCL itself and the streams of a GPU (`tests/fake_nccl.py`).
"""

import inspect
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agent_r1_trl.generation import GenerationError, VLLMServerGenerator
from agent_r1_trl.generation.vllm import nccl_group, server_sync, weight_transfer
from agent_r1_trl.generation.vllm.nccl_group import describe_gpu, reason_against
from agent_r1_trl.generation.vllm.server_routes import rpc
from agent_r1_trl.generation.vllm.transfer_connection import is_gone
from agent_r1_trl.generation.vllm.weight_transfer import WeightSender, receive_weights
from tests import fake_nccl
from tests.fake_nccl import FakeNCCLLibrary, digest
from tests.fake_vllm import FakeServer
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


class NeverDone:
    def __init__(self, device):
        pass

    def begin(self):
        pass

    end = is_done = begin


@pytest.mark.parametrize(("timeout_s", "is_broken"), [(0.05, False), (60, True)], ids=["hangs", "is gone"])
def test_a_member_that_hangs_or_is_gone_ends_the_broadcast_and_the_group(monkeypatch, timeout_s, is_broken):
    calls = []
    library = SimpleNamespace(ncclCommAbort=calls.append, ncclCommDestroy=None)
    communicator = SimpleNamespace(nccl=library, comm="group", broadcast=lambda part, src, stream: None)
    monkeypatch.setattr(nccl_group, "DeviceLine", NeverDone)
    group = nccl_group.NCCLGroup(communicator, CPU)
    with pytest.raises(nccl_group.GroupError, match="gone, or took too long"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8), timeout_s=timeout_s, is_broken=lambda: is_broken)
    group.close()
    assert calls == ["group"], "aborted once"
    with pytest.raises(nccl_group.GroupError, match="closed"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8), timeout_s=1, is_broken=lambda: False)


# -------------------------------------------------------------------- the real communicator

PART_BYTES = 2**16
WEIGHTS = [
    ("embed", torch.randn(3000, 40)),  # larger than a part
    ("norm", torch.randn(64).bfloat16()),
    ("scale", torch.tensor(2.5)),
    ("odd", torch.randn(7, 3).half()),
    ("head.T", torch.randn(40, 300).T),
    ("last", torch.randn(500, 40)),
]
SIZE = sum(value.nbytes for _, value in WEIGHTS)


@pytest.fixture
def nccl(monkeypatch):
    """This process, the trainer's, uses vLLM's communicator with the stand-in for the library."""
    pytest.importorskip("vllm")
    fake_nccl.install(monkeypatch.setattr, server_sync)
    monkeypatch.setattr(FakeNCCLLibrary, "broadcasts", [])


@pytest.fixture
def sender(nccl, monkeypatch):
    """With small parts."""
    parts, pack = weight_transfer.parts, weight_transfer.pack
    monkeypatch.setattr(weight_transfer, "parts", lambda payload: parts(payload, PART_BYTES))
    monkeypatch.setattr(
        weight_transfer, "pack", lambda weights, device: pack(weights, device=device, part_bytes=PART_BYTES)
    )
    sender = WeightSender("127.0.0.1", 0, timeout_s=300)
    yield sender
    sender.close()


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


WORKERS = """
import json, sys, threading
import torch
from agent_r1_trl.generation.vllm import weight_transfer
from tests import fake_nccl

fake_nccl.install()
parts = weight_transfer.parts
port, part_bytes, workers = json.loads(sys.argv[1])
weight_transfer.parts = lambda payload: parts(payload, part_bytes)
found = [None] * len(workers)

def receive(place, token, rank, num_taken, has_gpu):
    device = torch.device("cpu") if has_gpu else None
    weights = weight_transfer.receive_weights("127.0.0.1", port, token, rank=rank, timeout_s=100, device=device)
    taken = []
    while len(taken) != num_taken and (item := next(weights, None)) is not None:
        taken.append((item[0], item[1].clone()))
    weights.close()
    found[place] = fake_nccl.digest(taken)

threads = [threading.Thread(target=receive, args=(place, *worker)) for place, worker in enumerate(workers)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([found, sum(size for size, _ in fake_nccl.FakeNCCLLibrary.broadcasts)]))
"""
"""The workers of several servers, as threads of one process."""


@pytest.mark.vllm
@pytest.mark.slow
def test_each_server_has_a_group_of_its_own_and_one_that_fails_harms_no_other(sender):
    """`whole` has two workers, `leaver` goes away after one weight, `cpu` cannot use NCCL."""
    tokens = {server: sender.expect(server) for server in ("whole", "leaver", "cpu")}
    workers = [
        (tokens["whole"], 0, -1, True),
        (tokens["whole"], 1, -1, True),
        (tokens["leaver"], 0, 1, True),
        (tokens["cpu"], 0, -1, False),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", WORKERS, json.dumps([sender.port, PART_BYTES, workers])],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    sizes = {"whole": 2, "leaver": 1, "cpu": 1}
    sender.wait_for({server: (size, lambda: process.poll() is not None) for server, size in sizes.items()})
    assert sender.open_groups(list(sizes), CPU) == {"cpu": "this worker has no GPU"}
    sender.send(until_gone(sender, "leaver"), device=CPU)
    failures = sender.failures
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    digests, num_bytes = json.loads(out.splitlines()[-1])
    assert digests == [digest(WEIGHTS), digest(WEIGHTS), digest(WEIGHTS[:1]), digest(WEIGHTS)]
    assert failures.keys() == {"leaver"}
    assert 2 * SIZE < num_bytes < 3.1 * SIZE, "what `cpu` got did not come that way"


def until_gone(sender, server):
    """The weights; before the last one, a server's worker has left."""
    yield from WEIGHTS[:-1]
    (connection,) = sender._workers[server].values()
    deadline = time.monotonic() + 20
    while not is_gone(connection) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield WEIGHTS[-1]


def receive_here(sender, server, found):
    """A worker of a server, as a thread of this process."""
    token = sender.expect(server)

    def receive():
        weights = receive_weights("127.0.0.1", sender.port, token, rank=0, timeout_s=20, device=CPU)
        found.extend((name, value.clone()) for name, value in weights)

    thread = threading.Thread(target=receive)
    thread.start()
    sender.wait_for({server: (1, lambda: not thread.is_alive())})
    return thread


@pytest.mark.vllm
@pytest.mark.slow
def test_where_nccl_fails_when_the_members_meet_the_weights_go_over_the_connection(sender, monkeypatch):
    found = []
    monkeypatch.setattr(FakeNCCLLibrary, "refuses", True)
    thread = receive_here(sender, "a", found)
    assert "unhandled system error" in sender.open_groups(["a"], CPU)["a"]
    sender.send(WEIGHTS, device=CPU)
    thread.join(20)
    assert digest(found) == digest(WEIGHTS)
    assert FakeNCCLLibrary.broadcasts == []


@pytest.mark.vllm
@pytest.mark.slow
def test_a_trainer_that_must_use_nccl_says_what_keeps_it_from_that(nccl):
    model = torch.nn.Linear(2, 1)
    with FakeServer() as server:
        generator = VLLMServerGenerator([server.url], stop_token_ids=[1], weight_transfer="nccl")
        with pytest.raises(GenerationError, match="runs on no GPU") as refused:
            generator.sync(model)
        generator.close()
        assert "vllm_weight_transfer to 'sockets'" in str(refused.value)
        for cure in ("sockets", "auto"):
            generator = VLLMServerGenerator([server.url], stop_token_ids=[1], weight_transfer=cure)
            generator.sync(model)
            generator.close()
        assert server.weights is not None


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
@pytest.mark.slow
def test_both_workers_of_a_tensor_parallel_server_get_their_halves_of_a_merged_adapter(url, nccl):
    """With tied embeddings, which are sent once."""
    from tests.generation.test_vllm import STOP_ID, change, gap, random_policy

    generator = VLLMServerGenerator([url], stop_token_ids=[STOP_ID], weight_transfer="nccl")
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
