"""The page on a training step sends its reader to few files, and a step runs through each of them."""

import re
import sys
from pathlib import Path

from agent_r1_trl.testing import AddEnv
from tests.trainers.helpers import make_trainer

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "agent_r1_trl"
PAGE = ROOT / "docs" / "one-training-step.md"
MAX_FILES = 12


def test_a_step_runs_through_the_files_that_the_page_names_and_they_are_few(tmp_path):
    trainer = make_trainer(tmp_path, env=AddEnv, max_steps=2)
    met = set()
    step = trainer.training_step

    def note(frame, event, argument):
        if event == "call":
            met.add(frame.f_code.co_filename)

    def traced(*args, **kwargs):
        sys.setprofile(note)
        try:
            return step(*args, **kwargs)
        finally:
            sys.setprofile(None)

    trainer.training_step = traced
    trainer.train()
    named = set(re.findall(r"\(\.\./src/agent_r1_trl/([\w/]+\.py)\)", PAGE.read_text(encoding="utf-8")))
    assert 8 < len(named) <= MAX_FILES
    only_names = {"update/entries.py"}
    """The list of entries has no function of its own."""
    loops = {"rollout/loop.py"}
    """Runs in the thread of the rollout loop, where no profile is taken."""
    assert {name for name in named - only_names - loops if str(SRC / name) not in met} == set()
