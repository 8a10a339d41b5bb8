"""A trajectory that splits into rows is trained as it was in one row.

The same tokens are trained in one row each and cut into rows at turns, whose contexts are then the same ids: nothing
that the model computes changes, so advantages must not change by a bit, and loss and gradients not beyond rounding.
Every estimator, and the units token and trajectory: `test_row_laws.py`.
"""

import random

import pytest
import torch

from agent_r1_trl.critic.attach import critic_parameters
from agent_r1_trl.recording import read_trajectories
from agent_r1_trl.testing import call, make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.config_checks import WHOLE_ROWS
from agent_r1_trl.trajectory import Segment, Trajectory, Turn
from agent_r1_trl.update.rows import TrainingRows, trained_rows
from tests.effort import nightly
from tests.trainers.effects import CPU
from tests.trainers.helpers import make_trainer, move_weights, questions

MANY = {"context": {"policy": "window", "turns": 99}}  # allows for rows, and rewrites nothing


def three_turns(rng, turn):
    """Two calls, then an answer of random length; one of four trajectories answers at once."""
    ends = turn == 2 or rng.random() < 0.25
    return say("x" * rng.randrange(1, 9)) if ends else call(a=rng.randrange(9), b=rng.randrange(9))


def split(trajectory, turns):
    """Open a new row at each of these turns, with the context that there is."""
    ids = trajectory.prompt_ids + trajectory.completion_ids
    starts = [trajectory.turns[turn].start for turn in turns if 0 < turn < len(trajectory.turns)]
    trajectory.segments = [
        Segment(start=start, row=row, prompt_ids=ids[: len(trajectory.prompt_ids) + start])
        for row, start in enumerate(starts, start=1)
    ]
    return trajectory


def at_random(trajectory):
    rng = random.Random(trajectory.seed)
    return split(trajectory, [turn for turn in range(1, 5) if rng.random() < 0.7])


def at_every_turn(trajectory):
    return split(trajectory, range(1, 9))


def splitting(trainer, cut):
    """The trainer, whose rollouts are cut into rows."""
    roll_out = trainer.rollouts.generate

    def rolled_out(*args, **kwargs):
        batch = roll_out(*args, **kwargs)
        batch.trajectories = [cut(item) for item in batch.trajectories]
        return batch

    trainer.rollouts.generate = rolled_out
    return trainer


def one_step(trainer):
    """Loss and gradients of the first optimizer step, added up over its micro-batches, and advantages over time."""
    trainer.model.train()
    trainer.model.zero_grad()
    per_update = trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    rows = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(2)  # TRL shuffles the trajectories of a rollout
    loss = 0.0
    for trainer._step in range(per_update):
        inputs = trainer._prepare_inputs(rows)
        if trainer._step == 0:
            credit = [item.advantages for item in trainer.last_trajectories]
            move_weights(trainer.model)
        part = trainer.compute_loss(trainer.model, inputs)
        part.backward()
        loss += part.item()
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}, credit


def both(tmp_path, cut=at_random, **options):
    """One step with each trajectory in one row, and with rows."""
    options = {"script": three_turns, "record_trajectories": "jsonl", **MANY, **options}
    if "beta" in options:  # TRL loads the reference from a folder
        make_policy(make_tokenizer("qwen3")).save_pretrained(tmp_path / "policy")
        options["model"] = str(tmp_path / "policy")
    whole = one_step(make_trainer(tmp_path / "one", **options))
    trainer = splitting(make_trainer(tmp_path / "rows", **options), cut)
    rows = one_step(trainer)
    assert max(rows_of(trainer)) > 1 and len(set(rows_of(trainer))) > 1
    return whole, rows


def assert_same_step(whole, rows):
    (loss, gradients, credit), (loss_of_rows, gradients_of_rows, credit_of_rows) = whole, rows
    assert credit_of_rows == credit, "advantages"
    assert any(any(values) for values in credit)
    assert loss_of_rows == pytest.approx(loss, abs=1e-6, rel=1e-5)
    assert gradients_of_rows.keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    assert largest > 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_of_rows[name], gradient, atol=1e-6 * float(largest) + 1e-8, rtol=1e-4)


def rows_of(trainer):
    return [len(item.rows) for item in trainer.last_trajectories]


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")


class ValuedTrainer(MultiTurnPPOTrainer):
    """Its critic, which begins with zeros, tells states apart from the start."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        for parameter in critic_parameters(self.model).values():
            parameter.data.normal_(0, 0.5)


@pytest.mark.parametrize(("loss_type", "unit", "same"), [("dapo", "trajectory", "grpo"), ("grpo", "token", "dapo")])
def test_with_a_unit_one_loss_type_weighs_as_the_other_does_without(tmp_path, loss_type, unit, same):
    options = {"script": three_turns, "record_trajectories": "jsonl"}
    steps = [
        one_step(make_trainer(tmp_path / name, loss_type=kind, loss_unit=asked, **options))
        for name, kind, asked in (("plain", same, None), ("unit", loss_type, unit))
    ]
    assert_same_step(*steps)


HALF = {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5}
BY_TOKENS = {"update_layout": "shared", "max_tokens_per_micro_batch": 500, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "loss_type": "dr_grpo"},
        {**HALF, **BY_TOKENS, "loss_unit": "turn", "beta": 0.05},
        {"truncated_trajectories": "mask", "max_turns": 2, "loss_type": "grpo", "gradient_accumulation_steps": 2},
        *nightly(
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "loss_type": "luspo"},
            {"update_layout": "grouped", "gradient_accumulation_steps": 2},
            {"update_layout": "packed"},
            {"update_layout": "shared", "gradient_accumulation_steps": 2, "loss_type": "grpo"},
            {**BY_TOKENS, "loss_type": "dapo", "steps_per_generation": 2, "gradient_accumulation_steps": 4},
            {**HALF, "gradient_accumulation_steps": 2, "loss_type": "grpo"},
        ),
    ],
    ids=str,
)
def test_rows_are_dealt_without_a_change_to_the_optimizer_step(tmp_path, options):
    assert_same_step(*both(tmp_path, per_device_train_batch_size=4, num_generations=2, **options))


def test_kept_trajectories_take_turns_in_the_optimizer_steps_with_all_their_rows(tmp_path):
    """One group of two is kept, for four optimizer steps of two trajectories."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 4}
    options |= {
        "sampling.filter_groups": "top_fraction",
        "sampling.filter_value": 0.25,
        "num_generations": 2,
        "loss_unit": "turn",
        **MANY,
    }
    trainer = splitting(make_trainer(tmp_path, script=three_turns, **options), at_every_turn)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    buffer = trainer._buffered_inputs
    trained = [set(inputs["trajectory_row"][inputs["tool_mask"].any(dim=1)].tolist()) for inputs in buffer]
    assert [len(names) for names in trained] == [1, 1, 0, 0] and not trained[0] & trained[1]
    assert [bool(inputs["has_signal"]) for inputs in buffer] == [True, True, False, False]
    for names, inputs in zip(trained[:2], buffer, strict=False):
        (name,) = names
        rows = [row for row in trained_rows(trainer.last_trajectories[name]) if any(row.action_mask)]
        assert int(inputs["tool_mask"].any(dim=1).sum()) == len(rows)
        assert float(inputs["turn_scale"]) == pytest.approx(1 / len(rows)), "turns that are trained on"


REFUSED = {
    "importance_sampling_level": "sequence",
    "off_policy_mask_threshold": 0.5,
    "loss_mask": False,
    "advantage_mask": False,
    "loss_type": "vespo",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_at_a_whole_row_is_refused_where_there_may_be_several(name):
    assert {*WHOLE_ROWS, "loss_type"} == {*REFUSED}
    option = {name: REFUSED[name]}
    with pytest.raises(ValueError, match=rf"{name}=.*context.policy"):
        MultiTurnGRPOConfig(**CPU, **option, **MANY)
    MultiTurnGRPOConfig(**CPU, **MANY)
    MultiTurnGRPOConfig(**CPU, **option)
    steps = {**CPU, **option, "context": {"policy": "step"}}
    if name == "importance_sampling_level":  # of a row that is one turn
        MultiTurnGRPOConfig(**steps)
    else:
        with pytest.raises(ValueError, match=rf"{name}=.*context.policy='step'"):
            MultiTurnGRPOConfig(**steps)


def trajectory_of(turns, **changes):
    """Two sampled tokens after the prompt [1]."""
    values = {
        "prompt_messages": [], "prompt_ids": [1], "completion_ids": [8, 9], "action_mask": [1, 1],
        "logprobs": [-1.0, -1.0], "authors": ["policy", "policy"], "stop_reason": "done",
    }  # fmt: skip
    return Trajectory(**values, turns=turns, **changes)


def test_a_context_that_was_rewritten_before_anything_was_sampled_is_the_one_that_is_trained():
    """The first turn sampled nothing; the second stands after another prompt, in the only row with an action."""
    turns = [Turn(start=0, end=0, message=say("")), Turn(start=0, end=2, message=say("5"))]
    trajectory = trajectory_of(turns, turn_ids=[1, 1], segments=[Segment(start=0, row=1, prompt_ids=[2, 3])])
    (row,) = TrainingRows.of([trajectory], MultiTurnGRPOConfig(**CPU, **MANY)).rows
    assert (row.prompt_ids, row.completion_ids) == ([2, 3], [8, 9])


def test_rewritten_contexts_are_refused_where_no_policy_rewrites_any():
    turns = [Turn(start=0, end=1, message=say("")), Turn(start=1, end=2, message=say("5"))]
    trajectory = split(trajectory_of(turns, turn_ids=[0, 1]), [1])
    with pytest.raises(ValueError, match=r"context\.policy"):
        TrainingRows.of([trajectory], MultiTurnGRPOConfig(**CPU))
    assert len(TrainingRows.of([trajectory], MultiTurnGRPOConfig(**CPU, **MANY))) == 2


# -------------------------------------------------------------------- contexts that a policy rewrites

WINDOW = {"context.policy": "window", "context.turns": 1, "max_turns": 4, "script": three_turns}


def lengths(completion_ids, trajectory, **kwargs):
    """Functions see trajectories, whose completion is that of all rows."""
    assert completion_ids == [item.completion_ids for item in trajectory]
    return [len(ids) / 100 for ids in completion_ids]


@pytest.mark.parametrize("trainer_class", [MultiTurnPPOTrainer, *nightly(MultiTurnGRPOTrainer)])
def test_summaries_are_trained_evaluated_logged_and_recorded(tmp_path, trainer_class):
    def script(rng, turn):  # every second one is a summary
        return say("x" * rng.randrange(1, 9)) if turn % 2 or rng.random() < 0.2 else call(a=rng.randrange(9), b=2)

    trainer = make_trainer(
        tmp_path, trainer=trainer_class, script=script, max_turns=3, max_completion_length=400, max_steps=2,
        context={"policy": "summarise", "turns": 1, "summary_tokens": 12, "summary_prompt": "Sum up."},
        eval_dataset=questions(4),
        record_trajectories="jsonl", per_device_eval_batch_size=4, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, reward_funcs=[lengths],
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2 and all(entry["rollout/summaries"] > 0 and entry["grad_norm"] > 0 for entry in logged)
    assert all(entry["rollout/rows"] == 1 + entry["rollout/summaries"] for entry in logged)
    trajectories = list(read_trajectories(tmp_path))
    summaries = [turn for item in trajectories[:16] for turn in item.turns if turn.is_summary]
    assert len(summaries) > 8 and all(turn.summary_request["content"] == "Sum up." for turn in summaries)
    for item in trajectories[:16]:
        for turn in item.turns:
            if turn.is_summary and any(item.advantages):
                assert any(item.advantages[turn.start : turn.end]), "a summary is trained"
