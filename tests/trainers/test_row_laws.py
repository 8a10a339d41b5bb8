"""The same tokens in any rows are trained as in one, by hypothesis: any number of rows, and back to an earlier one.

Rows of the same tokens are comparable only if what a token is predicted from does not change with its row. So the
policy here is a bigram model: its attention adds nothing, and a token depends on the one before it alone. Every prompt
and every observation ends in the same token, which is therefore the one before each turn in whatever row it stands.
The critic's old values are those of the token before as well, from a table, so that advantages can agree to the bit.
"""

import copy
import functools
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.advantages.estimators import ESTIMATORS
from agent_r1_trl.critic.attach import critic_parameters
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.rollout_batch import RolloutBatch
from agent_r1_trl.trajectory import Author, Segment, StopReason, Trajectory, Turn
from agent_r1_trl.update.rows import TrainingRows
from tests.effort import examples
from tests.trainers.helpers import make_trainer, move_weights
from tests.trainers.test_rows import LOSS_TYPES, MANY, assert_same_step

LAST = 9
"""The token before every turn."""
NUM_TRAJECTORIES = 8

# -------------------------------------------------------------------- trajectories


def one_trajectory(rng, index, most_turns=5):
    """Turns of one token or more, an observation behind each, in one row; some are lost, truncated or silent."""
    ids, turn_ids, turns = [], [], []
    num_turns = rng.randint(1, most_turns)
    for number in range(num_turns):
        sampled = [rng.randrange(10, 20) for _ in range(rng.choice((1, 1, 2, 5)))]
        turns.append(Turn(start=len(ids), end=len(ids) + len(sampled), message={"role": "assistant", "content": ""}))
        turns[-1].reward = rng.choice((0.0, 0.0, 0.5, -1.0))
        turns[-1].observations = [{"role": "tool", "content": f"{rng.randrange(2)}"}]
        behind = [*(rng.randrange(20, 30) for _ in range(rng.randrange(3))), LAST]
        behind = behind if number + 1 < num_turns else behind[:-1]  # a state of its own to bootstrap from
        ids += sampled + behind
        turn_ids += [number] * len(sampled) + [-1] * len(behind)
    mask = [int(turn >= 0) for turn in turn_ids]
    stop = rng.choice((StopReason.DONE,) * 4 + (StopReason.MAX_TURNS,) * 2 + (StopReason.GENERATION_ERROR,))
    return Trajectory(
        prompt_messages=[{"role": "user", "content": "?"}],
        prompt_ids=[rng.randrange(30, 40) for _ in range(rng.randrange(3))] + [LAST],
        completion_ids=ids,
        action_mask=mask,
        logprobs=[-rng.random() * bit for bit in mask],
        turn_ids=turn_ids,
        authors=[Author.POLICY if bit else Author.ENVIRONMENT for bit in mask],
        turns=turns,
        stop_reason=stop,
        outcome_reward=rng.choice((0.0, 1.0, -0.5)),
        example_id=f"q{index // 4}",
        generation=index % 4,
    )


def in_rows(rng, trajectory, stay, back):
    """The same tokens, each turn in the row of the one before (`stay`), in an earlier one (`back`) or in a new one."""
    split = copy.deepcopy(trajectory)
    present, num_rows = 0, 1
    for turn in split.turns[1:]:
        chosen = present
        if rng.random() >= stay:
            chosen = rng.randrange(num_rows) if rng.random() < back else num_rows
        if chosen != present:
            is_new = chosen == num_rows
            prompt = [*(rng.randrange(40, 50) for _ in range(rng.randrange(4))), LAST] if is_new else None
            split.segments.append(Segment(start=turn.start, row=chosen, prompt_ids=prompt))
            present, num_rows = chosen, num_rows + is_new
    return split


def batch_of(seed, stay=0.4, back=0.5):
    """A batch of two groups in one row each, and in rows."""
    rng = random.Random(seed)
    whole = [one_trajectory(rng, index) for index in range(NUM_TRAJECTORIES)]
    return whole, [in_rows(rng, item, stay, back) for item in whole]


splits = st.tuples(st.integers(0, 2**32), st.sampled_from((0.0, 0.4, 0.8)), st.sampled_from((0.0, 0.5, 1.0)))
"""Arguments of `batch_of`; `stay=0, back=0` gives each turn a row of its own."""


@settings(max_examples=examples(100))
@given(splits)
def test_the_token_rewards_of_all_rows_add_up_to_those_of_the_trajectory(arguments):
    for trajectories in batch_of(*arguments):
        rows = TrainingRows(trajectories)
        in_time = torch.zeros(len(trajectories), rows.length, dtype=torch.float64)
        for index, item in enumerate(trajectories):
            in_time[index, : len(item.completion_ids)] = torch.tensor(item.token_rewards(), dtype=torch.float64)
        places = torch.zeros(len(rows), max(len(row.completion_ids) for row in rows.rows))
        rewards = rows.to_rows(in_time, places)
        mask = torch.zeros_like(places)
        for number, row in enumerate(rows.rows):
            mask[number, : len(row.action_mask)] = torch.tensor(row.action_mask)
        assert not rewards[mask == 0].any()
        sums = rows.total(rewards.sum(dim=1)).tolist()
        assert sums == pytest.approx([item.total_reward for item in trajectories], abs=1e-12)


def test_the_splits_are_of_every_kind():
    seen = [item for seed in range(20) for item in batch_of(seed)[1]]
    numbers = {len(item.rows) for item in seen}
    assert {1, 2, 3, 4} <= numbers
    assert any(segment.prompt_ids is None for item in seen for segment in item.segments), "some come back"
    assert any(sum(row.action_mask) == 1 for item in seen for row in item.rows)
    assert {item.stop_reason for item in seen} == {"done", "max_turns", "generation_error"}


# -------------------------------------------------------------------- trainers


def bigram_policy():
    """Attention that adds nothing, and never will."""
    model = make_policy(make_tokenizer("qwen3"), hidden_size=16)
    mute(model)
    return model


def mute(model):
    for name, parameter in model.named_parameters():
        if "self_attn" in name:
            parameter.requires_grad_(False)
            parameter.data.zero_()


class Table:
    """A critic that knows a value of each token."""

    training = True
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)) / 2

    def __call__(self, input_ids, **kwargs):
        return SimpleNamespace(state_values=self.values[input_ids])


class TabledTrainer(MultiTurnPPOTrainer):
    """Its critic's old values are those of the table."""

    def _old_values(self, *args):
        model, self.model = self.model, Table()
        try:
            return super()._old_values(*args)
        finally:
            self.model = model


CASES = {
    "grpo": {},
    "batch scale": {"scale_rewards": "batch"},
    "dr_grpo": {"advantage_estimator": "dr_grpo"},
    "rloo": {"advantage_estimator": "rloo"},
    "turn_grpo": {"advantage_estimator": "turn_grpo"},
    "gigpo": {"advantage_estimator": "gigpo"},
    "reinforce_pp": {"advantage_estimator": "reinforce_pp", "gamma": 0.9, "beta": 0.1, "kl_placement": "reward"},
    "reinforce_pp_baseline": {"advantage_estimator": "reinforce_pp_baseline"},
    "parts": {"separate_process_advantages": True, "normalize_process_rewards": True},
    "kl": {"beta": 0.05, "truncated_trajectories": "mask"},
    "gae": {"advantage_estimator": "gae", "gamma": 0.9, "lam": 0.8, "bootstrap_truncated": True},
    "bilevel_gae": {"advantage_estimator": "bilevel_gae", "gamma": 0.95, "gamma_turn": 0.9, "lam_turn": 0.8},
    "step_gae": {"advantage_estimator": "step_gae", "gamma_turn": 0.9, "lam_turn": 0.8, "bootstrap_truncated": True},
    "whitened": {"advantage_estimator": "gae", "whiten_advantages": True, "truncated_trajectories": "mask"},
}
CRITICS = ("gae", "bilevel_gae", "step_gae", "whitened")


def test_every_estimator_is_among_the_cases():
    names = {options.get("advantage_estimator", "grpo") for options in CASES.values()}
    assert names == {*ESTIMATORS}


@functools.cache
def trainer_of(case, steps=1):
    """A trainer that takes `steps` micro-batches of a rollout; its rollout is whatever `train_on` is given."""
    folder = Path(tempfile.mkdtemp())
    bigram_policy().save_pretrained(folder / "policy")
    options = {"trainer": MultiTurnGRPOTrainer, "num_generations": 4}
    if case in CRITICS:
        options = {"trainer": TabledTrainer, "num_generations": 1, "critic": "head"}
    trainer = make_trainer(
        folder, model=str(folder / "policy"), per_device_train_batch_size=NUM_TRAJECTORIES // steps,
        gradient_accumulation_steps=steps, num_iterations=2, **options, **MANY, **CASES[case],
    )  # fmt: skip
    mute(trainer.model)
    torch.manual_seed(3)
    for parameter in critic_parameters(trainer.model).values():
        parameter.data.normal_(0, 0.5)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = steps
    return trainer


def train_on(trainer, trajectories):
    """Loss, gradients and advantages over time of one optimizer step on these, after the weights have moved."""
    trajectories, credit = copy.deepcopy(trajectories), []

    def roll_out(rows, model, position):
        return RolloutBatch(list(rows), trajectories, None, position=position)

    def note(batch, output):
        pairs = zip(batch.trajectories, batch.training_rows.to_time(output["advantages"]).tolist(), strict=True)
        credit.extend(row[: len(item.completion_ids)] for item, row in pairs)

    weights = copy.deepcopy(trainer.model.state_dict())
    trainer.rollouts.generate, trainer.rollouts.finish = roll_out, lambda: None
    trainer._record, trainer._buffered_inputs = note, None
    trainer.model.zero_grad()
    rows = [{"id": item.example_id, "prompt": item.prompt_messages} for item in trajectories]
    torch.manual_seed(2)  # TRL shuffles the trajectories of a rollout
    loss = 0.0
    for step in range(trainer.args.gradient_accumulation_steps):
        trainer._step = step
        inputs = trainer._prepare_inputs(rows)
        if step == 0:
            move_weights(trainer.model)
        part = trainer.compute_loss(trainer.model, inputs)
        part.backward()
        loss += part.item()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.load_state_dict(weights)
    return loss, gradients, credit


def assert_same(whole, rows):
    if any(any(values) for values in whole[2]):
        assert_same_step(whole, rows)
    else:  # nothing was learnt from these, but perhaps by the critic
        assert rows[2] == whole[2] and rows[0] == pytest.approx(whole[0], abs=1e-6)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(12))
@given(splits, st.sampled_from(LOSS_TYPES), st.sampled_from((None, "token", "trajectory")))
def test_the_same_tokens_in_any_rows_have_the_credit_the_loss_and_the_gradient_of_one(case, split, loss_type, unit):
    trainer = trainer_of(case)
    trainer.loss_type = trainer.args.loss_type = loss_type
    trainer.args.loss_unit = unit
    whole, rows = batch_of(*split)
    assert_same(train_on(trainer, whole), train_on(trainer, rows))


@pytest.mark.parametrize("case", ("grpo", "gae"))
@settings(max_examples=examples(12))
@given(splits, st.sampled_from(LOSS_TYPES), st.sampled_from((None, "token", "trajectory")))
def test_so_it_is_where_the_rows_are_spread_over_micro_batches(case, split, loss_type, unit):
    if (loss_type, unit) == ("bnpo", None):
        unit = "token"  # a mean within each micro-batch, whose tokens change with the rows
    trainer = trainer_of(case, steps=2)
    trainer.loss_type = trainer.args.loss_type = loss_type
    trainer.args.loss_unit = unit
    whole, rows = batch_of(*split)
    assert_same(train_on(trainer, whole), train_on(trainer, rows))
