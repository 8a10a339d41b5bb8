"""What a terminal shows while an evaluation goes on."""

import time

import numpy as np
import torch

from agent_r1_trl.cli.progress import trajectory_progress
from agent_r1_trl.trajectory import StopReason
from tests.environments.helpers import finished


def test_an_evaluation_says_how_far_it_is(terminal):
    shown = terminal(80)
    with trajectory_progress(shown.console, "evaluation", 4) as advance:
        assert shown.draw()[0].startswith("evaluation 0/4 ─") and "eta -:--:--" in shown.lines()[0]
        trajectory = finished()
        trajectory.info["em"] = 1.0
        advance(trajectory)
        time.sleep(0.01)
        assert shown.draw()[0].startswith("evaluation 1/4 ━") and "25%" in shown.lines()[0]
        assert shown.lines()[0].endswith("exact match 1.000")
    assert len(shown.lines()) == 2


def test_the_score_of_an_evaluation_so_far_is_that_of_its_table(terminal):
    shown = terminal(80)
    with trajectory_progress(shown.console, "evaluation", 4) as advance:
        for score in (np.bool_(True), torch.tensor(0.5)):
            trajectory = finished()
            trajectory.info["success"] = score
            advance(trajectory)
        advance(finished(stop_reason=StopReason.GENERATION_ERROR))
        advance(finished(stop_reason=StopReason.MAX_TURNS))  # without a score
        time.sleep(0.01)
        assert shown.draw()[0].startswith("evaluation 4/4 ━") and shown.lines()[0].endswith("success 0.750")
