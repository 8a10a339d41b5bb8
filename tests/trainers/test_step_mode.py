"""The step-level mode against loops written from its papers (Agent-R1, arXiv 2511.14460; StepPO, arXiv 2604.18401).

A trajectory is a list of steps: a context, what was sampled after it, a reward. The loops below read nothing else, and
share no code with the package; only values and log-probabilities come from its model, one step at a time.
"""

import math
import random

import pytest
import torch

from agent_r1_trl.testing import call, say
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trajectory import StopReason, Trajectory, Turn
from agent_r1_trl.update.credit_inputs import anchors
from agent_r1_trl.update.entries import TURN_SHARES
from tests.effort import short
from tests.trainers.helpers import make_trainer, move_weights, questions
from tests.trainers.test_rows import ValuedTrainer

STEP_MODE = {"context.policy": "step", "loss_unit": "turn", "max_turns": 5, "max_completion_length": 900}
GAMMA, LAM, CLIP, VALUE_CLIP = 0.9, 0.8, 0.2, 0.2
PPO = {"trainer": ValuedTrainer, "critic": "head", "num_generations": 1, "advantage_estimator": "step_gae"}
PPO |= {"gamma_turn": GAMMA, "lam_turn": LAM}
KINDS = {"grpo": {}, "ppo": PPO}


def walk(rng, turn):
    """Up to five turns of calls and texts of random length."""
    if rng.random() < 0.35:
        return say("x" * rng.randrange(1, 12))
    return call(a=rng.choice([1, 10**6, 10**12]), b=rng.randrange(3))


def process(trajectory, **kwargs):
    return [[random.Random(f"{item.seed} {index}").gauss(0, 1) for index in range(len(item.turns))]
            for item in trajectory]  # fmt: skip


def outcome(trajectory, **kwargs):
    return [random.Random(item.seed).choice([0.0, 1.0]) for item in trajectory]


def step_trainer(folder, kind, count, **options):
    options = {"num_generations": 4, **KINDS[kind], **STEP_MODE, **options}
    return make_trainer(
        folder, script=walk, turn_reward_funcs=[process], reward_funcs=[outcome], train_dataset=questions(count),
        per_device_train_batch_size=count, **options,
    )  # fmt: skip


def first_batch(trainer):
    """The rows as they were scored, and the micro-batch that is trained on."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    held, trainer._record = {}, lambda batch, output: held.update(output)
    return held, trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


# -------------------------------------------------------------------- the loops


def steps_of(trajectory):
    """(context, sampled ids, reward) of each step."""
    rewards = [turn.reward for turn in trajectory.turns]
    rewards[-1] += trajectory.outcome_reward
    rows = trajectory.rows
    assert len(rows) == len(trajectory.turns), "every turn is a row"
    found = []
    for row, reward in zip(rows, rewards, strict=True):
        ids = [token for token, is_action in zip(row.completion_ids, row.action_mask, strict=True) if is_action]
        assert row.completion_ids[: len(ids)] == ids and ids
        found.append((row.prompt_ids, ids, reward))
    return found


def naive_gae(rewards, values):
    """Advantages and targets of the steps of one trajectory: the sum of discounted temporal differences."""
    values = [*values, 0.0]
    differences = [reward + GAMMA * values[k + 1] - values[k] for k, reward in enumerate(rewards)]
    advantages = [
        sum((GAMMA * LAM) ** (later - k) * differences[later] for later in range(k, len(rewards)))
        for k in range(len(rewards))
    ]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=False)]


def naive_group(returns):
    """Advantage of each trajectory among those of its prompt."""
    mean = sum(returns) / len(returns)
    std = math.sqrt(sum((value - mean) ** 2 for value in returns) / (len(returns) - 1))
    return [(value - mean) / (std + 1e-4) for value in returns]  # TRL's epsilon; the papers' code has 1e-6


def naive_credit(kind, trajectories, values):
    """Advantage and target of every step of the batch, in order; targets are None without a critic.

    Args:
        kind: grpo or ppo.
        trajectories: N lists of steps, four to a prompt.
        values: of each trajectory's steps, before their first tokens.
    """
    if kind == "grpo":
        returns = [sum(reward for *_, reward in steps) for steps in trajectories]
        of_groups = [naive_group(returns[start : start + 4]) for start in range(0, len(returns), 4)]
        of_trajectories = [value for group in of_groups for value in group]
        return [v for v, steps in zip(of_trajectories, trajectories, strict=True) for _ in steps], None
    advantages, targets = [], []
    for steps, own in zip(trajectories, values, strict=True):
        found = naive_gae([reward for *_, reward in steps], own)
        advantages += found[0]
        targets += found[1]
    mean = sum(advantages) / len(advantages)
    std = math.sqrt(sum((value - mean) ** 2 for value in advantages) / (len(advantages) - 1))
    return [(value - mean) / std for value in advantages], targets


def naive_forward(model, step, has_critic):
    """Log-probabilities of a step's tokens, and the values before each of them."""
    context, sampled, _ = step
    ids = torch.tensor([context + sampled])
    scores = model(input_ids=ids).logits[0, len(context) - 1 : -1].log_softmax(dim=-1)
    values = model(input_ids=ids, values_only=True).state_values[0, len(context) - 1 : -1] if has_critic else None
    return scores.gather(1, torch.tensor(sampled)[:, None])[:, 0], values


def naive_loss(model, steps, old, advantages, targets, *, by_turn):
    """The mean over steps of the mean over tokens of PPO's loss; half the mean over tokens of the critic's."""
    policy, critic, num_tokens = 0.0, 0.0, 0
    for step, (old_scores, old_values), advantage, target in zip(steps, old, advantages, targets, strict=True):
        scores, values = naive_forward(model, step, old_values is not None)
        change = scores - old_scores
        ratio = (change.mean() if by_turn else change).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy = policy - torch.minimum(ratio * advantage, clipped * advantage).mean() / len(steps)
        num_tokens += len(scores)
        if values is not None:
            near = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
            critic = critic + torch.maximum((values - target) ** 2, (near - target) ** 2).sum()
    return policy + 0.5 * 0.5 * critic / num_tokens


# -------------------------------------------------------------------- agreement


@pytest.mark.parametrize("kind", short(KINDS, "ppo"))
def test_credit_and_weights_of_200_trajectories_are_those_of_a_loop(tmp_path, kind):
    trainer = step_trainer(tmp_path, kind, 200, update_layout="shared")
    held, inputs = first_batch(trainer)
    trajectories = [steps_of(item) for item in trainer.last_trajectories]
    assert len(trajectories) == 200 and {len(steps) for steps in trajectories} == {1, 2, 3, 4, 5}
    steps = [step for found in trajectories for step in found]
    assert len(held["advantages"]) == len(steps), "in the same order"
    values = iter(held["old_values"][:, 0].tolist() if kind == "ppo" else [0.0] * len(steps))
    advantages, targets = naive_credit(kind, trajectories, [[next(values) for _ in own] for own in trajectories])
    for row, (_, sampled, _) in enumerate(steps):
        num = len(sampled)
        at_all = held["advantages"][row]
        assert at_all[:num].tolist() == pytest.approx([advantages[row]] * num, abs=2e-5)
        assert not at_all[num:].any()
        if targets is not None:
            assert held["returns"][row, :num].tolist() == pytest.approx([targets[row]] * num, abs=1e-5)
        weights = held[TURN_SHARES][row] * float(inputs["turn_scale"])
        assert weights[:num].tolist() == pytest.approx([1 / num / len(steps)] * num, rel=1e-5)
        assert not weights[num:].any()


class Board:
    """A walk on a ring of three fields, which the model reads in a context of its own; nothing else answers a turn."""

    def reset(self, example):
        self.place, self.places = 0, [0]
        return [self.board()]

    def board(self):
        return {"role": "user", "content": f"You are on field {self.place}."}

    def step(self, message):
        self.place = (self.place + len(message["content"])) % 3
        self.places.append(self.place)
        return [], float(self.place == 2), len(self.places) == 6, {"next_context": [self.board()]}

    def outcome_reward(self, trajectory):
        trajectory.info["places"] = self.places
        return float(self.place)


def naive_gigpo(trajectories):
    """Advantages per turn of one prompt's trajectories, with the fields that the environment was on."""
    rewards = [[turn.reward for turn in item.turns] for item in trajectories]
    for own, item in zip(rewards, trajectories, strict=True):
        own[-1] += item.outcome_reward
    returns = [[sum(0.95 ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))] for own in rewards]
    fields = {}
    for own, item in zip(returns, trajectories, strict=True):
        for value, field in zip(own, item.info["places"], strict=False):
            fields.setdefault(field, []).append(value)
    of_field = {
        (field, value): advantage
        for field, values in fields.items()
        for value, advantage in zip(values, naive_group(values), strict=True)
    }
    of_trajectory = naive_group([sum(own) for own in rewards])
    return [
        [whole + of_field[field, value] for value, field in zip(own, item.info["places"], strict=False)]
        for whole, own, item in zip(of_trajectory, returns, trajectories, strict=True)
    ], sum(map(len, fields.values())) / len(fields)


def test_gigpo_compares_the_turns_that_read_the_same_context(tmp_path):
    trainer = make_trainer(
        tmp_path, env=Board, script=lambda rng, turn: say("x" * rng.randrange(1, 4)), train_dataset=questions(1),
        **STEP_MODE, advantage_estimator="gigpo", num_generations=8,
    )  # fmt: skip
    held, _ = first_batch(trainer)
    expected, size = naive_gigpo(trainer.last_trajectories)
    found = iter(held["advantages"][:, 0].tolist())
    assert [[next(found) for _ in own] for own in expected] == [pytest.approx(own, abs=1e-5) for own in expected]
    assert trainer._metrics["train"]["credit/step_group_size"] == [pytest.approx(size)]
    assert size == 40 / 3, "five turns of eight trajectories on three fields"


def anchors_after(*contexts):
    """Of trajectories whose second turn reads one of these contexts: what GiGPO tells it by."""
    empty = {key: [] for key in ("prompt_ids", "completion_ids", "action_mask", "logprobs", "turn_ids", "authors")}
    found = []
    for context in contexts:
        turns = [Turn(start=0, end=0, message={}, next_context=given) for given in (context, None)]
        item = Trajectory(prompt_messages=[], turns=turns, stop_reason=StopReason.DONE, **empty)
        found.append(anchors(item)[1])
    return found


def test_the_anchor_tells_contexts_apart_by_their_calls_and_never_by_ids():
    def context(name="move", step=1, number="a"):
        calls = [{"type": "function", "id": number, "function": {"name": name, "arguments": {"id": step}}}]
        answer = {"role": "tool", "content": "moved", "tool_call_id": number}
        return [{"role": "assistant", "content": "", "tool_calls": calls}, answer]

    first, again, *others = anchors_after(context(), context(number="b"), context(name="jump"), context(step=2))
    assert first == again
    assert len({first, *others}) == 3


CASES = [
    ("grpo", {"loss_type": "dapo"}),
    ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ("grpo", {"loss_type": "dr_grpo", "update_layout": "shared"}),
    ("ppo", {"loss_type": "bnpo"}),
    ("ppo", {"loss_type": "luspo", "importance_sampling_level": "sequence", "update_layout": "packed"}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_loss_and_gradient_are_those_of_a_loop(tmp_path, kind, options):
    # Two epochs over a rollout, so that old log-probabilities are those of scoring.
    trainer = step_trainer(tmp_path, kind, 8, num_iterations=2, **options)
    model, has_critic = trainer.model, isinstance(trainer, MultiTurnPPOTrainer)
    _, inputs = first_batch(trainer)
    trajectories = [steps_of(item) for item in trainer.last_trajectories]
    steps = [step for found in trajectories for step in found]
    with torch.no_grad():
        old = [naive_forward(model, step, has_critic) for step in steps]
    values = iter([float(found[0]) if has_critic else 0.0 for _, found in old])
    advantages, targets = naive_credit(kind, trajectories, [[next(values) for _ in own] for own in trajectories])
    move_weights(model)
    loss = trainer.compute_loss(model, inputs)
    model.zero_grad()
    loss.backward()
    found = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    by_turn = "importance_sampling_level" in options
    expected = naive_loss(model, steps, old, advantages, targets or [None] * len(steps), by_turn=by_turn)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
    largest = max(gradient.abs().max() for gradient in found.values())
    assert largest > 1e-3
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5 * float(largest), rtol=1e-3)
