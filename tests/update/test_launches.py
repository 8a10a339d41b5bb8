"""How many kernels a GPU launches for an optimizer step: small models wait for the host, which launches them.

Counted on a CPU by the operators that a step dispatches, with the depth of a real model and tiny matrices: widths do
not change their number. Views and allocations launch nothing; operators that launch several kernels count as many.
"""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_kernels import in_one_call

TRAIN_STEP = Path(__file__).parents[2] / "benchmarks" / "train_step.py"
ALLOCATIONS = (
    "empty",
    "new_empty",
    "resize_",
    "set_",
    "lift",
    "sym_",
    "_local_scalar",
    "is_pinned",
    "_has_compatible",
)
"""Beginnings of the names of operators that are no views and launch nothing all the same."""
SEVERAL = {
    "_flash_attention_backward": 6,
    "_efficient_attention_backward": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
    "index_put": 3,
    "nonzero": 3,
    "cumsum": 2,
}
"""Operators that launch several kernels on a GPU."""


class Launches(TorchDispatchMode):
    """Counts the kernels of the operators that are called in it."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if not func.is_view and not name.startswith(ALLOCATIONS) and name not in ("detach", "_unsafe_view", "alias"):
            self.found[name] += SEVERAL.get(name, 1)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def train_step():
    spec = importlib.util.spec_from_file_location("train_step", TRAIN_STEP)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAIN_STEP.parent))  # it imports what the benchmarks share
        spec.loader.exec_module(module)
    module.be_quiet()
    return module


def count(train_step, folder, layout, *, num_layers, num_rows, micro_batch):
    """Kernels of the forward and backward passes of one optimizer step, in groups of 8 rows."""
    train_step.SHAPES["deep"] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers, "num_attention_heads": 4,
    }  # fmt: skip
    train_step.KEY_HEADS["deep"], train_step.VOCABULARY["deep"] = 2, 512
    words = {
        "--model": "deep", "--groups": num_rows // 8, "--group-size": 8, "--micro-batch": micro_batch, "--prompt": 16,
        "--median": 12, "--longest": 64, "--only": layout,
    }  # fmt: skip
    options = train_step.parse_arguments([str(word) for pair in words.items() for word in pair])
    trainer, batch = train_step.prepare(options, layout, str(folder))
    train_step.hand_over(trainer, batch)
    with Launches() as launches:
        for _ in range(trainer.args.gradient_accumulation_steps):
            trainer.training_step(trainer.model_wrapped, [], None)
    return sum(launches.found.values())


@pytest.mark.release
def test_a_step_launches_hardly_more_kernels_than_trls(train_step, tmp_path, monkeypatch):
    size = {"num_layers": 24, "num_rows": 32, "micro_batch": 8}
    trls = count(train_step, tmp_path / "trl", "trl", **size)
    with in_one_call(monkeypatch, "flash"):
        ours = {layout: count(train_step, tmp_path / layout, layout, **size) for layout in ("packed", "shared")}
    assert max(ours.values()) <= 1.15 * trls, (ours, trls)


@pytest.mark.release
def test_the_number_of_branches_costs_no_kernels(train_step, tmp_path, monkeypatch):
    with in_one_call(monkeypatch, "flash"):
        found = count(train_step, tmp_path, "shared", num_layers=28, num_rows=256, micro_batch=256)
    assert found <= 6000
