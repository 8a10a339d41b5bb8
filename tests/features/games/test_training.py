"""A game in the trainer: no data set, groups that share a level, rewards and metrics that arrive."""

from agent_r1_trl.features.games import FrozenLakeEnv
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from tests.features.games.helpers import written
from tests.trainers.helpers import make_args, scripted

ACTIONS = ("Left", "Down", "Right", "Up")


def test_without_a_data_set_each_group_plays_a_level_of_its_own(tmp_path):
    played = []

    class Lake(FrozenLakeEnv):
        def load_level(self, level):
            played.append((level, self.random.random()))
            super().load_level(level)

    tokenizer = make_tokenizer("qwen3")
    trainer = MultiTurnGRPOTrainer(
        model=make_policy(tokenizer),
        args=make_args(tmp_path, max_completion_length=400, max_turns=3),
        env=Lake,
        train_dataset=None,
        processing_class=tokenizer,
        generator=scripted(tokenizer, lambda rng, turn: written(*rng.choices(ACTIONS, k=3))),
    )
    trainer.train()
    levels = [level for level, _ in played]
    assert len(played) == 8 and sorted(levels.count(level) for level in set(levels)) == [4, 4]
    assert len({slip for _, slip in played}) == 8
    logged = trainer.state.log_history[0]
    assert {"env/success", "env/fell", "env/num_actions", "env/num_effective_actions"} <= set(logged)
    assert 1 <= logged["env/num_actions"] <= 9 and logged["env/num_invalid_turns"] == 0
