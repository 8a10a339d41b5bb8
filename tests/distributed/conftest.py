"""One launch of the worker for each kind, shared by the tests that read its results."""

import functools

import pytest
import torch

from tests.distributed import worker
from tests.distributed.launch import launch


@pytest.fixture(scope="session")
def critics(tmp_path_factory):
    """`critics(kind)`: what one step of each critic gave in that kind of launch; `one` is this very process."""

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "one":
            return {case: worker.one_step(*case, folder) for case in worker.CASES}
        launch(kind, worker.__name__, folder)
        return torch.load(folder / worker.CRITICS_FILE)

    return run
