"""How many files a reader of one training step meets: those that are executed between a data row and its gradient."""

import sys
from pathlib import Path

from tests.toys import AddEnv
from tests.trainers.helpers import make_trainer

SRC = Path(__file__).resolve().parents[2] / "src" / "agent_r1_trl"
WITH_PACKAGES_OF_THEIR_OWN = ("rollout", "chat", "generation", "tools", "environments")
"""Each has a page of its own in docs/."""
MAX_FILES = {"the step": 18, "features": 10}
"""They only go down."""


def test_a_default_step_executes_few_files(tmp_path):
    trainer = make_trainer(tmp_path, env=AddEnv, max_steps=1)
    met, step = set(), trainer.training_step

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
    own = sorted(Path(name).relative_to(SRC) for name in met if name.startswith(str(SRC)))
    own = [path for path in own if path.parts[0] not in WITH_PACKAGES_OF_THEIR_OWN]
    features = [path for path in own if path.parts[0] == "features"]
    assert Path("trainers/multi_turn.py") in own and features
    assert len(features) <= MAX_FILES["features"], features
    assert len(own) - len(features) <= MAX_FILES["the step"], [path for path in own if path not in features]
