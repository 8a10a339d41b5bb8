"""The published chat templates that docs/model-families.md is about.

`trl: x.jinja` comes with TRL. For `llama.cpp: x.jinja` and `xinference: x`, set AGENT_R1_TEMPLATES to a folder with
the sdist of llama-cpp-python 0.3.36 and the wheel of xinference 4.1.0 from pypi.org. They are read, never installed,
and the templates keep their own licences, so none is copied here.

    AGENT_R1_TEMPLATES=~/archives pytest tests/chat/test_families.py
"""

from __future__ import annotations

import functools
import json
import os
import tarfile
import zipfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from agent_r1_trl.chat.checks import control_tokens
from agent_r1_trl.testing.tokenizers import read_template
from tests.families import FAMILIES

FAMILY_OF = {
    "trl: qwen2_5.jinja": "qwen2_5",
    "xinference: qwen2.5-coder-instruct": "qwen2_5",
    "trl: qwen3.jinja": "qwen3",
    "trl: qwen3_instruct_2507.jinja": "qwen3_instruct_2507",
    "trl: qwen3_vl.jinja": "qwen3_instruct_2507",
    "xinference: Qwen3-Thinking": "qwen3_thinking_2507",
    "trl: qwen3_5_think.jinja": "qwen3_5",
    "trl: qwen3_5_nothink.jinja": "qwen3_5",
    "trl: qwen3_6.jinja": "qwen3_5",
    "trl: qwen3_8.jinja": "qwen3_5",
    "llama.cpp: Qwen3-Coder.jinja": "qwen3_5",
    "xinference: QwQ-32B": "qwq",
    "llama.cpp: NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja": "hermes_3",
    "trl: llama3_1.jinja": "llama3_1",
    "trl: llama3_2.jinja": "llama3_2",
    "llama.cpp: meta-llama-Llama-3.3-70B-Instruct.jinja": "llama3_1",
    "llama.cpp: mistralai-Mistral-Nemo-Instruct-2407.jinja": "mistral_nemo",
    "xinference: mistral-instruct-v0.3": "mistral_nemo",
    "llama.cpp: Mistral-Small-3.2-24B-Instruct-2506.jinja": "mistral_small_3_2",
    "llama.cpp: mistralai-Ministral-3-14B-Reasoning-2512.jinja": "ministral_3",
    "llama.cpp: deepseek-ai-DeepSeek-V3.1.jinja": "deepseek_v3_1",
    "trl: glm4moe.jinja": "glm_4_5",
    "llama.cpp: GLM-4.6.jinja": "glm_4_5",
    "xinference: GLM-4.7": "glm_4_7",
    "llama.cpp: GLM-4.7-Flash.jinja": "glm_4_7",
    "xinference: glm-5": "glm_4_7",
    "xinference: glm-5.3": "glm_4_7",
    "llama.cpp: ByteDance-Seed-OSS.jinja": "seed_oss",
    "llama.cpp: NVIDIA-Nemotron-Nano-v2.jinja": "nemotron_nano_2",
    "trl: nemotron_3_nano.jinja": "nemotron_3",
    "trl: nemotron_3_super.jinja": "nemotron_3",
    "trl: nemotron_3_ultra.jinja": "nemotron_3",
    "trl: lfm2.jinja": "lfm2",
    "trl: lfm2_v2.jinja": "lfm2",
    "trl: lfm2_2_5.jinja": "lfm2_5",
    "trl: lfm2_2_5_v2.jinja": "lfm2_5",
    "llama.cpp: LFM2.5-Instruct.jinja": "lfm2_5",
    "trl: gemma4.jinja": "gemma4",
    "trl: gemma4_v5.jinja": "gemma4",
    "llama.cpp: google-gemma-4-31B-it.jinja": "gemma4",
    "trl: gptoss.jinja": "gpt_oss",
}
"""File of the table -> the family of `tests/families` whose tokenizer and wire format it takes."""


@functools.lru_cache
def _archived() -> dict[str, str]:
    """What the archives of the folder hold, under the names of the table."""
    found: dict[str, str] = {}
    if not (folder := os.environ.get("AGENT_R1_TEMPLATES")):
        return found
    for path in Path(folder).expanduser().glob("llama_cpp_python-*.tar.gz"):
        with tarfile.open(path) as archive:
            for member in archive:
                if "/models/templates/" in member.name and (file := archive.extractfile(member)):
                    found[f"llama.cpp: {Path(member.name).name}"] = file.read().decode()
    for path in Path(folder).expanduser().glob("xinference-*.whl"):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if "/llm/models/" in name and name.endswith(".json"):
                    model = json.loads(archive.read(name))
                    model = model[0] if isinstance(model, list) else model
                    found[f"xinference: {Path(name).stem}"] = model.get("chat_template") or ""
    assert found, f"AGENT_R1_TEMPLATES={folder} has none of the archives"
    return found


def read_published(file: str) -> str | None:
    """Source of a template as the table names it; None if it is not here."""
    origin, _, name = file.partition(": ")
    if origin == "trl":
        return read_template(name.removesuffix(".jinja"))
    return _archived()[file] if _archived() else None


def published_tokenizer(family: str, source: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the family with this template, each of whose control tokens is one token."""
    tokenizer = FAMILIES[family]()
    tokenizer.add_tokens(sorted(control_tokens(source) - set(tokenizer.get_vocab())), special_tokens=True)
    tokenizer.chat_template = source
    return tokenizer
