"""Which trajectories of a batch share their seeds."""

from agent_r1_trl.rollout import rollout_requests
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOConfig, MultiTurnPPOTrainer
from tests.trainers.helpers import PlainEnv, make_args


class DealtEnv(PlainEnv):
    """An environment that owns its data: what it asks hangs on the reset seed."""

    def seed(self, *, reset_seed, dynamics_seed):
        self.reset_seed = reset_seed

    def reset(self, example):
        return [{"role": "user", "content": f"question {self.reset_seed}"}]


def rolled_out(tmp_path, num_generations):
    tokenizer = make_tokenizer("qwen2_5")
    trainer = MultiTurnPPOTrainer(
        model=make_policy(tokenizer),
        args=make_args(
            tmp_path, MultiTurnPPOConfig, critic="head", num_generations=num_generations, max_tokens_per_turn=4
        ),
        env=DealtEnv,
        train_dataset=None,
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.last_trajectories


def test_rows_of_an_environment_that_owns_its_data_are_different_draws(tmp_path):
    trajectories = rolled_out(tmp_path, num_generations=1)
    assert len({item.seed for item in trajectories}) == len(trajectories) == 8
    assert len({item.prompt_messages[0]["content"] for item in trajectories}) == 8


def test_a_group_shares_its_start_and_nothing_else(tmp_path):
    trajectories = rolled_out(tmp_path, num_generations=4)
    questions = [item.prompt_messages[0]["content"] for item in trajectories]
    assert len(set(questions[:4])) == len(set(questions[4:])) == 1 and questions[0] != questions[4]
    assert len({item.seed for item in trajectories}) == 8


ROWS = [{"id": name} for name in "aaabbb"]


def draws(rows, first_row=0, step=7):
    requests = rollout_requests(rows, first_row=first_row, group_size=3, seed=5, step=step)
    return [(item.example_id, item.generation, item.seed, item.reset_seed) for item in requests]


def test_ranks_that_share_a_group_draw_what_one_rank_would():
    assert draws(ROWS[:2]) + draws(ROWS[2:4], first_row=2) + draws(ROWS[4:], first_row=4) == draws(ROWS)
    assert [generation for _, generation, _, _ in draws(ROWS)] == [0, 1, 2, 0, 1, 2]


def test_every_training_step_has_its_own_draws_and_every_evaluation_the_same():
    assert draws(ROWS, step=7) != draws(ROWS, step=8)
    evaluated = draws(ROWS, step=None)
    assert evaluated == draws(ROWS[:4], step=None) + draws(ROWS[4:], first_row=4, step=None)  # in batches
    assert not {seed for _, _, seed, _ in evaluated} & {seed for _, _, seed, _ in draws(ROWS)}


def test_equal_rows_of_an_evaluation_are_different_draws():
    requests = rollout_requests([{}] * 200, first_row=0, group_size=2, seed=5, step=None)
    assert len({item.seed for item in requests}) == 200
    starts = [item.reset_seed for item in requests]
    assert starts[::2] == starts[1::2] and len(set(starts)) == 100  # the members of a group start alike
