"""`doctor --run` in two processes: a tiny recipe, then the same with a reward function that raises in one of them."""

import os
import sys
from pathlib import Path

import torch

from agent_r1_trl.features.doctor.run_command import main
from tests.cli.conftest import write_task
from tests.tokenizers import make_tokenizer
from tests.trainers.helpers import make_policy

REWARDS = """
import os

def of_length(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]

def broken(completions, **kwargs):
    if os.environ["RANK"] == "1":
        raise KeyError("gold")
    return of_length(completions)
"""


def work(folder):
    rank = int(os.environ["RANK"])
    folder = folder / f"of-{rank}"  # both write the same files
    folder.mkdir()
    os.chdir(folder)
    tokenizer = make_tokenizer("qwen2_5")
    make_policy(tokenizer).save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("rewards.py").write_text(REWARDS)
    settings = {"model_name_or_path": "./model", "num_processes_expected": 2, "reward_funcs": ["rewards.py:of_length"]}
    path = str(write_task(folder, "model", **settings))
    code = main(["--config", path])
    print(f"rank {rank}: exit code {code}", flush=True)
    code = main(["--config", path, "--reward_funcs", "rewards.py:broken"])
    print(f"rank {rank}: exit code of a broken one {code}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    work(Path(sys.argv[1]))
