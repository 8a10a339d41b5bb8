"""What two ranks get of one judge that ranks groups: `python -m tests.distributed.judging FOLDER`.

`FOLDER/url` holds the judge's address; rank 0 writes the rewards of all ranks to `FOLDER/found.json`.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from agent_r1_trl.trainers.rewards import RewardCalls
from tests.recording.examples import two_turns
from tests.rewards.test_judge import judge

GROUPS = "pppqqqrr"
"""The prompt of each trajectory of both ranks; a rank has half of them."""
TEXTS = ["a", "aa", "aaa", "b", "bb", "b", "c", "cc"]
URL_FILE, FOUND_FILE = "url", "found.json"


def rewards(reward, places, num_rows):
    """What the trainer gets of the function for this rank's trajectories, which may be none."""
    calls = RewardCalls([two_turns() for _ in places], num_rows)
    trainer = SimpleNamespace(reward_funcs=[reward], reward_func_names=["judge"])
    filled = [*places, *[0] * num_rows][:num_rows]
    with calls.checked(trainer):
        values = trainer.reward_funcs[0](
            prompts=[GROUPS[place] for place in filled], completions=[TEXTS[place] for place in filled]
        )
    calls.resolve(torch.zeros(len(places), 1), [reward], ["judge"])
    return values[: len(places)]


if __name__ == "__main__":
    folder, state = Path(sys.argv[1]), PartialState(cpu=True)
    url = (folder / URL_FILE).read_text(encoding="utf-8")
    reward = judge(url, ranking=True, cache=str(folder / "judge.sqlite"))
    first = 4 * state.process_index
    found = {
        "shared": rewards(reward, range(first, first + 4), 4),
        "alone": rewards(reward, [6, 7] if state.process_index == 0 else [], 2),
    }
    everything = gather_object([found])
    if state.is_main_process:
        (folder / FOUND_FILE).write_text(json.dumps(everything), encoding="utf-8")
