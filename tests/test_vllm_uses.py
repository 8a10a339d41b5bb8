"""The static check of vLLM's releases: what it collects from our source, and what it finds missing."""

import importlib.util
from pathlib import Path

import pytest

import vllm_uses
from vllm_release import Release
from vllm_uses import Use, collect_uses

SOURCES = {
    "__init__.py": 'LAZY = {"SamplingParams": ".params:SamplingParams"}\nfrom .engine import *\n',
    "params.py": "class Base:\n    seed: int = 0\nclass SamplingParams(Base):\n    top_k: int = 0\n",
    "engine.py": "class LLMEngine:\n    def __init__(self, model, *, dtype=None):\n        self.model = model\n"
    "    def step(self): ...\n    def sleep(self, level=1): ...\n    def add(self, name, prompt): ...\n",
    "envs.py": 'variables = {"VLLM_PORT": 1}\n',
    "entrypoints/cli_args.py": "class FrontendArgs:\n    tool_parser: str\n",
    "entrypoints/api.py": '@router.post("/rpc")\ndef rpc(raw, wait: bool):\n    raw["method"]\n# too \\\n# long\n'
    'print("It is too "\n      f"long {1}.")\n',
    "run.py": 'if __name__ == "__main__":\n    pass\n',
}
COMMUNICATOR = "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator"


@pytest.fixture
def release(tmp_path):
    for name, text in SOURCES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Release(tmp_path)


THERE = [
    Use("name", "vllm:SamplingParams"),
    Use("name", "vllm:LLMEngine"),
    Use("name", "vllm.engine:"),
    Use("member", "vllm:LLMEngine", "step"),
    Use("member", "vllm:LLMEngine", "model"),
    Use("call", "vllm:SamplingParams", "", ("seed", "top_k")),
    Use("call", "vllm:LLMEngine", "", ("*1", "dtype")),
    Use("call", "vllm:LLMEngine", "add", ("*2",)),
    Use("call", "vllm:LLMEngine", "sleep", ("level",)),
    Use("variable", "", "VLLM_PORT"),
    Use("option", "", "--no-tool-parser"),
    Use("route", "", "POST /rpc"),
    Use("field", "route:/rpc", "method"),
    Use("field", "route:/rpc", "wait"),
    Use("message", "", "too long | too short"),
    Use("program", "", "vllm.run"),
]
GONE = [
    Use("name", "vllm:LLM"),
    Use("name", "vllm.v2:"),
    Use("member", "vllm:LLMEngine", "wake_up"),
    Use("member", "vllm:LLM", "step"),
    Use("call", "vllm:SamplingParams", "", ("min_p",)),
    Use("call", "vllm:LLMEngine", "", ("dtype",)),
    Use("call", "vllm:LLMEngine", "add", ("*3",)),
    Use("call", "vllm:LLMEngine", "add", ("*1",)),
    Use("call", "vllm:LLMEngine", "sleep", ("tags",)),
    Use("variable", "", "VLLM_HOST"),
    Use("option", "", "--chat-template"),
    Use("route", "", "GET /rpc"),
    Use("route", "", "POST /sleep"),
    Use("field", "route:/rpc", "args"),
    Use("message", "", "too short"),
    Use("program", "", "vllm.engine"),
]


def test_what_a_release_has_is_found_and_what_it_lacks_is_named(release):
    assert release.lacks([*THERE, *GONE]) == GONE


def test_each_kind_of_use_is_collected_from_our_source():
    uses = collect_uses()
    assert {use.kind for use in uses} == {use.kind for use in THERE + GONE}
    assert {
        Use("name", "vllm._custom_ops:_supports_onednn"),
        Use("member", "vllm.outputs:RequestOutput", "finished"),
        Use("call", "vllm:EngineArgs", "", ("logprobs_mode",)),
        Use("call", "vllm.v1.engine.llm_engine:LLMEngine", "wake_up", ("tags",)),
        Use("call", COMMUNICATOR, "broadcast", ("*1", "src", "stream")),
        Use("member", "vllm.distributed.utils:StatelessProcessGroup", "broadcast_obj"),  # overridden
        Use("member", "vllm.distributed.utils:StatelessProcessGroup", "world_size"),  # set for the base's code
        Use("field", vllm_uses.FIELDS_OF["/v1/completions"], "return_tokens_as_token_ids"),
        Use("route", "", "POST /collective_rpc"),
        Use("program", "", "vllm.entrypoints.openai.api_server"),
    } <= set(uses)


def test_a_receiver_that_is_no_longer_used_is_an_error(monkeypatch):
    monkeypatch.setitem(vllm_uses.RECEIVERS["generation/vllm/engine.py"], "the_engine", "vllm:LLMEngine")
    with pytest.raises(ValueError, match="the_engine"):
        collect_uses()
    monkeypatch.setitem(vllm_uses.RECEIVERS, "generation/gone.py", {})
    with pytest.raises(ValueError, match=r"has no generation/gone\.py; correct it"):
        collect_uses()


@pytest.mark.vllm
def test_the_installed_vllm_has_all_that_we_use():
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    lacks = Release(Path(spec.origin).parents[1]).lacks(collect_uses())
    assert [str(use) for use in lacks] == []
