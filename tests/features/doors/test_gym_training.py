"""Environments of other packages in the trainer: two steps, groups that begin alike, and a run that was killed."""

import functools

import pytest
from transformers import TrainerCallback

from agent_r1_trl.features.doors import GymnasiumEnv, TextArenaEnv
from agent_r1_trl.testing import make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.features.doors.test_textarena import first_free
from tests.features.games.helpers import written
from tests.features.journal.helpers import roll_out, without_times
from tests.trainers.helpers import make_args, scripted

WAYS = ("Left", "Down", "Right", "Up")
lake = functools.partial(GymnasiumEnv, "FrozenLake-v1", actions=WAYS)
arena = functools.partial(TextArenaEnv, "TicTacToe-v0", opponent=first_free)
number = functools.partial(TextArenaEnv, "GuessTheNumber-v0")


def walk(rng, turn):
    return written(rng.choice((*WAYS, "Fly")))


def move(rng, turn):
    return say(f"[{rng.randrange(1, 10)}]")


CASES = {"gymnasium": (lake, walk), "two_players": (arena, move), "one_player": (number, move)}


def train(folder, env, script, trainer, callbacks=(), **options):
    tokenizer = make_tokenizer("qwen3")
    sizes = {"max_completion_length": 900, "max_turns": 4, "max_steps": 2}
    run = trainer(
        model=make_policy(tokenizer),
        args=make_args(folder, trainer.config_class, **{**sizes, **options}),
        callbacks=[*callbacks],
        env=env,
        train_dataset=None,
        processing_class=tokenizer,
        generator=scripted(tokenizer, script),
    )
    for callback in callbacks:
        callback.trainer = run
    run.train()
    return run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "gae"])
def test_two_steps_train_and_groups_begin_alike(tmp_path, case, estimator):
    env, script = CASES[case]
    begun = []

    class Counted(env.func):
        def start(self, seed):
            super().start(seed)
            begun.append((seed, self.observation))

    counted = functools.partial(Counted, *env.args, **env.keywords)
    trainer = MultiTurnPPOTrainer if estimator == "gae" else MultiTurnGRPOTrainer
    run = train(tmp_path, counted, script, trainer, advantage_estimator=estimator, num_generations=4)
    assert sorted(begun.count(start) for start in set(begun)) == [4] * 4, "two steps of two groups"
    assert len({seed for seed, _ in begun}) == 4
    logged = run.state.log_history[0]
    assert {"env/success", "env/num_actions", "env/num_invalid_turns"} <= set(logged)
    assert all(not item.stop_reason.is_infrastructure_failure for item in run.last_trajectories)
    assert len([entry for entry in run.state.log_history if "loss" in entry]) == 2


@pytest.mark.parametrize("case", CASES)
def test_an_episode_goes_on_where_the_journal_ends(tmp_path, case):
    env, script = CASES[case]
    expected, whole = roll_out(None, env, lambda rng: script(rng, 0))
    path = tmp_path / "journal"
    roll_out(path, env, lambda rng: script(rng, 0))
    data = path.read_bytes()
    for share in (0.4, 0.8):
        path.write_bytes(data[: int(share * len(data))])
        trajectories, talker = roll_out(path, env, lambda rng: script(rng, 0))
        assert list(map(without_times, trajectories)) == list(map(without_times, expected))
        assert sum(talker.sampled.values()) < sum(whole.sampled.values())


class Watched(TrainerCallback):
    def __init__(self):
        self.trainer, self.batches = None, []

    def on_step_end(self, args, state, control, **kwargs):
        self.batches.append([[item.seed, item.messages, item.total_reward] for item in self.trainer.last_trajectories])


@pytest.mark.parametrize("case", CASES)
def test_rollouts_in_flight_share_no_game_and_play_what_the_synchronous_run_plays(tmp_path, case):
    env, script = CASES[case]
    runs, in_use, most = [], [], []

    class Apart(env.func):
        """Knows the games that others are at."""

        def start(self, seed):
            super().start(seed)
            self.inner = getattr(self, "game", None) or self.env
            assert all(inner is not self.inner for inner in in_use), "another trajectory is at this game"
            in_use.append(self.inner)
            most.append(len(in_use))

        def close(self):
            in_use[:] = [inner for inner in in_use if inner is not self.inner]
            super().close()

    apart = functools.partial(Apart, *env.args, **env.keywords)
    for rollouts_ahead in (0, 2):
        watched = Watched()
        options = {"max_steps": 4, "rollouts_ahead": rollouts_ahead, "learning_rate": 0.0, "num_generations": 4}
        options |= {"failures.min_effective_share": 0.0} if rollouts_ahead else {}  # a script's log-probs
        train(tmp_path / str(rollouts_ahead), apart, script, MultiTurnGRPOTrainer, [watched], **options)
        runs.append(watched.batches)
        assert in_use == []
        assert max(most) == 8 if rollouts_ahead == 0 else 8 < max(most) <= 3 * 8, "games of several rollouts at once"
    assert len(runs[0]) == 4 and runs[0] == runs[1]
