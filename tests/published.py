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
