"""One launch of the worker for each kind, shared by the tests that read its results."""

import pytest
import torch

from tests.distributed import worker
from tests.distributed.critics import save_policy
from tests.distributed.launch import launch


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """An output folder for this process."""
    return save_policy(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session")
def results(tmp_path_factory, policy_folder):
    """`results(kind)`: what the worker computed in that kind of launch; `one` is this very process."""
    finished = {}

    def compute(kind):
        if kind == "one":
            return worker.compute(policy_folder)
        folder = save_policy(tmp_path_factory.mktemp(kind))
        launch(kind, worker.__name__, folder)
        return torch.load(folder / worker.RESULTS_FILE)

    def get(kind):
        if kind not in finished:
            finished[kind] = None  # a launch that failed is not tried again
            finished[kind] = compute(kind)
        assert finished[kind] is not None, f"the launch {kind} has failed before"
        return finished[kind]

    return get
