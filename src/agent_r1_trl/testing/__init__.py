"""For tests of your own environments, tools and rewards: the real rollout, with a scripted policy.

    from agent_r1_trl.testing import call, roll_out, say

    (trajectory,) = roll_out(MyEnv, [call("search", query="Oslo"), say("Norway")], [{"prompt": "Where is Oslo?"}])
    assert trajectory.final_text == "Norway" and trajectory.total_reward == 1.5

It needs neither a model nor a download nor pytest, and takes milliseconds. Importing it loads neither torch nor
transformers; they are loaded on first use of a tokenizer or a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agent_r1_trl.features.doctor import Finding, check_env
from agent_r1_trl.generation.scripted import ScriptedGenerator, ScriptedRequest, ScriptedTurn
from agent_r1_trl.testing.judge import judge_server, verdict
from agent_r1_trl.testing.local_server import LocalServer, local_server
from agent_r1_trl.testing.messages import call, calls, say
from agent_r1_trl.testing.script import ScriptedPolicy, roll_out
from agent_r1_trl.testing.toys import AddEchoEnv, AddEnv, add, echo

if TYPE_CHECKING:
    from agent_r1_trl.testing.policy import make_policy
    from agent_r1_trl.testing.tokenizers import FAMILIES, build_tokenizer, chat_of, make_tokenizer, read_template

_MODULE_OF = {
    "FAMILIES": "tokenizers",
    "build_tokenizer": "tokenizers",
    "chat_of": "tokenizers",
    "make_policy": "policy",
    "make_tokenizer": "tokenizers",
    "read_template": "tokenizers",
}
__all__ = [
    "FAMILIES",
    "AddEchoEnv",
    "AddEnv",
    "Finding",
    "LocalServer",
    "ScriptedGenerator",
    "ScriptedPolicy",
    "ScriptedRequest",
    "ScriptedTurn",
    "add",
    "build_tokenizer",
    "call",
    "calls",
    "chat_of",
    "check_env",
    "echo",
    "judge_server",
    "local_server",
    "make_policy",
    "make_tokenizer",
    "read_template",
    "roll_out",
    "say",
    "verdict",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
