import copy

import torch

from tests.referee import difference

RUN = {
    "weights": {"a": torch.arange(3.0)}, "logs": [{"loss": 0.5, "step_time": 1.0}],
    "table": {"advantages": [0.5, -0.5]}, "files": ["0.jsonl"],
}  # fmt: skip


def changed(change):
    other = copy.deepcopy(RUN)
    change(other)
    return difference(RUN, other)


def test_what_is_the_same_or_a_clock_is_no_difference():
    assert changed(lambda run: run["logs"][0].update(step_time=2.0)) == ""
    assert changed(lambda run: run["weights"]["a"].add_(1e-8)) == ""


def test_weights_metrics_advantages_files_and_errors_are_differences():
    assert changed(lambda run: run["weights"]["a"].add_(1e-6)) == "weights differ by 1.0e-06"
    assert changed(lambda run: run["logs"][0].update(loss=0.51)) == "loss 0.5 -> 0.51"
    assert changed(lambda run: run["logs"][0].pop("loss")) == "gone: loss"
    assert changed(lambda run: run["table"]["advantages"].reverse()) == "another column 'advantages'"
    assert changed(lambda run: run["files"].clear()) == "files [], not ['0.jsonl']"
    assert changed(lambda run: run.update(error="Boom\n")) == "FAILED\nBoom\n"
