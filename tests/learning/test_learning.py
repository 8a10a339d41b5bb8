"""Every algorithm solves small tasks, and none does with the advantages of other rows."""

import pytest
import torch

from tests.learning.tasks import BanditEnv, learn

SEEDS = (0, 1, 2)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small are faster on one core, and the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bandit_is_solved(tmp_path, seed):
    assert learn(tmp_path, BanditEnv, estimator="grpo", seed=seed, max_rollouts=12).is_solved


def test_a_run_is_reproducible(tmp_path):
    first, again, other = (learn(tmp_path, BanditEnv, estimator="grpo", seed=seed).rates for seed in (0, 0, 1))
    assert first == again != other
