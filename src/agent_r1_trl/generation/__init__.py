"""Generation back ends: one trajectory's token ids in, the ids the policy sampled out.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> [sync weights] -> next rollout
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.generation.base import Generation as Generation
    from agent_r1_trl.generation.base import GenerationError as GenerationError
    from agent_r1_trl.generation.base import GenerationRequest as GenerationRequest
    from agent_r1_trl.generation.base import Generator as Generator
    from agent_r1_trl.generation.base import SamplingParams as SamplingParams
    from agent_r1_trl.generation.local.generator import TransformersGenerator as TransformersGenerator
    from agent_r1_trl.generation.scripted import ScriptedGenerator as ScriptedGenerator
    from agent_r1_trl.generation.vllm.generator import VLLMGenerator as VLLMGenerator
    from agent_r1_trl.generation.vllm.server import VLLMServerGenerator as VLLMServerGenerator

_MODULE_OF = {
    "Generation": "base",
    "GenerationError": "base",
    "GenerationRequest": "base",
    "Generator": "base",
    "SamplingParams": "base",
    "ScriptedGenerator": "scripted",
    "TransformersGenerator": "local.generator",
    "VLLMGenerator": "vllm.generator",
    "VLLMServerGenerator": "vllm.server",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
