"""One launch of the worker for each kind, shared by the tests that read its results."""

import pytest
import torch

from tests.distributed import worker
from tests.distributed.critics import POLICY_FOLDER
from tests.distributed.launch import launch
from tests.tokenizers import make_tokenizer
from tests.trainers.helpers import make_policy


def make_folder(tmp_path_factory, name):
    """An output folder that holds the policy."""
    folder = tmp_path_factory.mktemp(name)
    make_policy(make_tokenizer("qwen3")).save_pretrained(folder / POLICY_FOLDER)
    return folder


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """An output folder for this process."""
    return make_folder(tmp_path_factory, "one")


@pytest.fixture(scope="session")
def results(tmp_path_factory, policy_folder):
    """`results(kind)`: what the worker computed in that kind of launch; `one` is this very process."""
    finished = {}

    def compute(kind):
        if kind == "one":
            return worker.compute(policy_folder)
        folder = make_folder(tmp_path_factory, kind)
        launch(kind, worker.__name__, folder)
        return torch.load(folder / worker.RESULTS_FILE)

    def get(kind):
        if kind not in finished:
            finished[kind] = None  # a launch that failed is not tried again
            finished[kind] = compute(kind)
        assert finished[kind] is not None, f"the launch {kind} has failed before"
        return finished[kind]

    return get
