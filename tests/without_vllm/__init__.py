"""vLLM seems not to be installed where this folder, with its `sitecustomize.py`, is in PYTHONPATH.

TRL imports vLLM wherever it is installed: 4 of the 10 processor seconds that a process of ours takes to start.
"""

import os
from pathlib import Path

FOLDER = str(Path(__file__).parent)


def search_path(is_hidden):
    """PYTHONPATH of this process, with this folder or without it."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", FOLDER)]
    return os.pathsep.join([FOLDER, *folders] if is_hidden else folders)
