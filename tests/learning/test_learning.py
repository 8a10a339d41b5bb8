"""Every algorithm solves small tasks, and none does with the advantages of other rows.

Solved is a success rate of at least 0.9 in two rollouts in a row. Steps are rollouts of 32 trajectories. The first
seed of some algorithms is trained in every run of the suite, the others in `make nightly`.
"""

import statistics

import pytest
import torch

from tests.effort import short
from tests.learning.tasks import BanditEnv, GuidedKeyDoorEnv, KeyDoorEnv, LockedKeyDoorEnv, learn

SEEDS = (0, 1, 2)
ALGORITHMS = {
    "grpo": {"estimator": "grpo"},
    "dr_grpo": {"estimator": "dr_grpo"},
    "rloo": {"estimator": "rloo"},
    "reinforce_pp": {"estimator": "reinforce_pp"},
    "reinforce_pp_baseline": {"estimator": "reinforce_pp_baseline"},
    "turn_grpo": {"estimator": "turn_grpo"},
    "gigpo": {"estimator": "gigpo"},
    "ppo_adapter": {"critic": "adapter"},
    "ppo_head": {"critic": "head"},
    "ppo_model": {"critic": "model"},
    "ppo_bilevel_gae": {"critic": "model", "estimator": "bilevel_gae"},
}
seeds = pytest.mark.parametrize("seed", short(SEEDS, SEEDS[0]))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small are faster on one core, and the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def key_door(tmp_path_factory):
    """(algorithm, seed) -> the run on the sparse key-door task, trained once."""
    runs = {}

    def run(algorithm, seed):
        if (algorithm, seed) not in runs:
            folder = tmp_path_factory.mktemp(algorithm)
            runs[algorithm, seed] = learn(folder, KeyDoorEnv, seed=seed, **ALGORITHMS[algorithm])
        return runs[algorithm, seed]

    return run


@pytest.mark.slow
@seeds
@pytest.mark.parametrize("algorithm", short(ALGORITHMS, "rloo", release=["reinforce_pp", "ppo_head"]))
def test_the_bandit_is_solved(tmp_path, algorithm, seed):
    assert learn(tmp_path, BanditEnv, seed=seed, max_rollouts=30, **ALGORITHMS[algorithm]).is_solved


@pytest.mark.slow
@seeds
@pytest.mark.parametrize("algorithm", short(ALGORITHMS, "gigpo", release=["grpo", "ppo_adapter"]))
def test_key_and_door_are_found_by_the_outcome_alone(key_door, algorithm, seed):
    run = key_door(algorithm, seed)
    assert run.is_solved, run.rates
    assert run.rates[0] < 0.5


@pytest.mark.release
@pytest.mark.parametrize("algorithm", short(ALGORITHMS, "grpo", "ppo_adapter"))
def test_nobody_finds_key_and_door_with_the_advantages_of_other_rows(tmp_path, key_door, algorithm):
    """In twice as many steps as the first seed needs with its own."""
    num_rollouts = 2 * len(key_door(algorithm, SEEDS[0]).rates)
    run = learn(tmp_path, KeyDoorEnv, shuffled=True, max_rollouts=num_rollouts, **ALGORITHMS[algorithm])
    assert len(run.rates) == num_rollouts and max(run.rates[-5:]) < 0.7, run.rates


@pytest.mark.matrix
@pytest.mark.slow
def test_process_rewards_save_a_third_of_the_steps_where_success_is_rare(tmp_path):
    """With the turn-wise credit of GiGPO, whose step advantages see at once which word led on."""
    options = {"max_rollouts": 80, "learning_rate": 3e-3}
    sparse, guided = (
        [len(learn(tmp_path, env, estimator="gigpo", seed=seed, **options).rates) for seed in range(5)]
        for env in (LockedKeyDoorEnv, GuidedKeyDoorEnv)
    )
    assert max(guided) < 80, guided
    assert statistics.median(guided) <= 0.7 * statistics.median(sparse), (guided, sparse)
