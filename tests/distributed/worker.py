"""Everything that one launch computes: `python -m tests.distributed.worker OUTPUT_DIR`, in any number of processes.

One launch does it all because a process spends most of its time on imports. Rank 0 writes `OUTPUT_DIR/results.pt`.
"""

import gc
import os
import sys
from pathlib import Path

import torch

from tests.distributed import agreement, critics, filtering, fsdp2, nonfinite, recording, resampling, rollback, rows
from tests.distributed.critics import num_processes

RESULTS_FILE = "results.pt"


def compute(folder):
    """The results of this process; credit is estimated in bare models, which DeepSpeed does not run."""
    credit_cases = () if "ACCELERATE_USE_DEEPSPEED" in os.environ else agreement.CREDIT_CASES
    runs = {policy: agreement.losses_and_signals(policy, folder) for policy in agreement.POLICIES}
    kind = "fsdp2" if fsdp2.is_asked_for() else "other"
    how = "non-reentrant" if kind == "fsdp2" else "reentrant"
    gc.collect()
    gc.freeze()  # what the first training has imported, which each later one would visit twice
    return {
        "critics": {case: critics.one_step(*case, folder) for case in critics.cases_of(kind)},
        "packed": {critic: critics.one_step(critic, how, folder, **critics.BY_TOKENS) for critic in critics.KINDS},
        "losses": {policy: losses for policy, (losses, _) in runs.items()},
        "signals": runs["full"][1],
        "nonfinite": nonfinite.skipped(folder),
        "filtered": {case: filtering.filtered(case, folder) for case in filtering.CASES},
        "resampled": resampling.resampled(folder),
        "gone_back": rollback.gone_back(folder),
        "recorded": {case: recording.recorded(case, folder) for case in recording.CASES},
        "rows": {case: rows.rows(case, folder) for case in rows.CASES},
        "whole": {case: rows.whole(case, folder) for case in rows.CASES if num_processes() == 1},
        "rewritten": {case: rows.rewritten(case, folder) for case in rows.REWRITTEN},
        "credit": {case: agreement.credit(case, folder) for case in credit_cases},
    }


if __name__ == "__main__":
    results = compute(Path(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, Path(sys.argv[1]) / RESULTS_FILE)
