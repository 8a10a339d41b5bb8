"""Rows that are lost or masked: what they leave to the loss, to its size, to baselines, to whitening, to the logs."""

import math
import operator
from functools import reduce
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from trl.trainer.utils import nanstd

from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.credit import source_scales, source_values
from agent_r1_trl.trainers.metrics import return_metrics
from agent_r1_trl.update.loss_weights import loss_weights, set_valid_scales
from tests.effort import nightly
from tests.trainers.helpers import (
    CUT,
    LOST,
    LikelihoodTrainer,
    add,
    answering,
    move_weights,
    scored_batch,
    step_gradients,
)

ROWS = ["xx", LOST, "x", LOST, LOST, "xxxxx", LOST, "xxxx"]
"""Two groups of four; an even number of letters is right."""


def only(inputs, keep):
    """A micro-batch of some of its rows, as if the others had never been."""
    rows = {name: value[keep] for name, value in inputs.items() if value is not None and value.dim()}
    del rows["in_baseline"]
    return rows | {"num_items_in_batch": inputs["num_items_in_batch"]}


# -------------------------------------------------------------------- the size of the gradient


ACCUMULATION = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_iterations": 2}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", *nightly("dr_grpo", "sapo", "luspo", "cispo", "vespo")])
def test_the_gradient_is_that_of_a_batch_without_the_lost_rows(tmp_path, loss_type, policy_path):
    trainer = answering(tmp_path, ROWS, model=policy_path, loss_type=loss_type, beta=0.1, **ACCUMULATION)
    gradients, buffer = step_gradients(trainer)
    live = [inputs["in_baseline"] for inputs in buffer]
    assert sum(int(rows.sum()) for rows in live) == 4
    assert len({int(rows.sum()) for rows in live}) > 1, "valid rows are spread unevenly"

    parts = [only(inputs, rows) for inputs, rows in zip(buffer, live, strict=True) if rows.any()]
    if loss_type in ("grpo", "dr_grpo", "sapo", "luspo"):
        # TRL's mean over rows, of the live ones alone in one micro-batch.
        parts = [{name: torch.cat([part[name] for part in parts]) for name in parts[0] if parts[0][name].dim()}]
    trainer.current_gradient_accumulation_steps = len(parts)
    trainer.args.steps_per_generation = len(parts)
    move_weights(trainer.model)
    trainer.model.zero_grad()
    for part in parts:
        trainer.compute_loss(trainer.model, {"num_items_in_batch": buffer[0]["num_items_in_batch"], **part}).backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-4


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_entropy_bonus_is_the_mean_over_micro_batches_with_valid_rows(tmp_path, adaptive):
    rows = [LOST] * 7 + ["xx"]
    bonus = {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_max": 0.3} if adaptive else {}
    trainer = answering(tmp_path, rows, entropy_coef=0.3, min_group_size=1, **bonus, **ACCUMULATION)
    trainer._last_world_entropy = 0.0
    gradients, buffer = step_gradients(trainer)  # a group of one has advantage 0: what is left is the bonus
    (alone,) = [only(inputs, inputs["in_baseline"]) for inputs in buffer if inputs["in_baseline"].any()]
    assert (alone["advantages"] == 0).all()
    trainer.current_gradient_accumulation_steps = 1
    move_weights(trainer.model)
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, alone).backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-7, rtol=1e-4, msg=name)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    # Logged as it is; micro-batches without a valid row, which have none, are excluded.
    entropies = [value for value in trainer._metrics["train"]["entropy"] if not math.isnan(value)]
    assert len(entropies) == 2
    assert entropies[0] == pytest.approx(entropies[1])


def test_a_loss_term_of_ones_own_is_a_mean_over_the_tokens_that_are_left(tmp_path):
    options = {"trainer": LikelihoodTrainer, "loss_type": "grpo"} | ACCUMULATION
    gradients, buffer = step_gradients(answering(tmp_path / "a", ROWS, **options))
    plain, _ = step_gradients(answering(tmp_path / "b", ROWS, **options | {"trainer": MultiTurnGRPOTrainer}))
    masks = [(inputs["completion_mask"] * inputs["tool_mask"]).bool() for inputs in buffer]
    trainer = answering(tmp_path / "c", ROWS, **options)
    move_weights(trainer.model)
    total = sum(int(mask.sum()) for mask in masks)
    for inputs, mask in zip(buffer, masks, strict=True):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        log_probs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, mask.shape[1])
        (-0.5 * log_probs[mask].sum() / total).backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(gradients[name] - plain[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


class OtherRanks:
    """An accelerator of several ranks; the others hold these valid rows and micro-batches, by optimizer step."""

    def __init__(self, *, num_processes, live):
        self.num_processes, self.live = num_processes, torch.tensor(live)

    def reduce(self, counts, reduction):
        assert reduction == "sum"
        return counts + self.live


def micro_batch(*live):
    ones = torch.ones(len(live), 3)
    masks = {"completion_mask": ones, "tool_mask": ones, "tokens_in_other_rows": torch.zeros(len(live))}
    return {"in_baseline": torch.tensor(live), "is_first_row": torch.tensor([True] * len(live)), **masks}


def weights(inputs, loss_type):
    args = SimpleNamespace(loss_unit=None)
    return loss_weights(inputs, SimpleNamespace(args=args, loss_type=loss_type))


def test_valid_rows_are_counted_by_optimizer_step_over_all_ranks():
    buffer = [micro_batch(True, False), micro_batch(False, False), micro_batch(True, True), micro_batch(True, True)]
    set_valid_scales(
        buffer, steps_per_update=2, accelerator=OtherRanks(num_processes=2, live=[[2.0, 1.0], [4.0, 2.0]])
    )
    # First step: 8 rows on two ranks, 1 + 2 live; 4 micro-batches, 1 + 1 live. Second: 8 of 8 and 4 of 4.
    assert [float(x["row_scale"]) for x in buffer] == pytest.approx([8 / 3, 8 / 3, 1, 1])
    assert [float(x["micro_batch_scale"]) for x in buffer] == [2, 2, 1, 1]
    assert weights(buffer[0], "grpo").flatten().tolist() == pytest.approx([8 / 3] * 2)
    assert weights(buffer[0], "luspo") == pytest.approx(8 / 3)
    assert weights(buffer[0], "bnpo") == 2
    assert weights(buffer[0], "dapo") == 1


@pytest.mark.parametrize("steps_per_update", [2, 6])
def test_a_buffer_that_optimizer_steps_do_not_divide_is_counted_as_a_whole(steps_per_update):
    buffer = [micro_batch(True, False), micro_batch(False, False), micro_batch(True, True)]
    set_valid_scales(buffer, steps_per_update=steps_per_update, accelerator=OtherRanks(num_processes=1, live=[[0, 0]]))
    assert [float(x["row_scale"]) for x in buffer] == [2, 2, 2]
    assert [float(x["micro_batch_scale"]) for x in buffer] == [1.5, 1.5, 1.5]


def test_a_step_whose_rows_are_all_lost_has_a_finite_gradient_of_zero(tmp_path):
    trainer = answering(tmp_path, ["xx", "x", "x", "xx"] + [LOST] * 4, loss_type="grpo", **ACCUMULATION)
    change = lambda inputs: inputs | {"tool_mask": inputs["tool_mask"] * 0}  # noqa: E731
    gradients, _ = step_gradients(trainer, change)
    assert all((gradient == 0).all() for gradient in gradients.values())
    nothing = [micro_batch(False, False)]
    set_valid_scales(nothing, steps_per_update=1, accelerator=OtherRanks(num_processes=1, live=[[0, 0]]))
    assert math.isfinite(nothing[0]["row_scale"])


def test_a_lost_row_is_neither_in_the_baseline_nor_in_the_loss(tmp_path):
    trainer = answering(tmp_path, ["x", "xx", "xxx", LOST, "x", "xx", "xxx", "xxxx"])
    batch = scored_batch(trainer)
    lost = (batch["tool_mask"] * batch["completion_mask"]).sum(1) == 0
    assert lost.tolist() == [False] * 3 + [True] + [False] * 4
    assert (batch["advantages"][lost] == 0).all()
    # Three valid members answer with 1, 2, 3 letters and earn -1, 1, -1: mean -1/3, std 1.1547.
    expected = [(-1 + 1 / 3) / 1.154801, (1 + 1 / 3) / 1.154801, (-1 + 1 / 3) / 1.154801]
    assert [row[row != 0][0].item() for row in batch["advantages"][:3]] == pytest.approx(expected, abs=1e-5)
    assert torch.isfinite(trainer.compute_loss(trainer.model, batch))


def test_truncated_rows_stay_in_the_denominator_as_in_trl(tmp_path):
    rows = ["xx", CUT, "x", CUT, "xx", CUT, "x", CUT]
    trainer = answering(tmp_path, rows, loss_type="grpo", truncated_trajectories="mask", **ACCUMULATION)
    _, buffer = step_gradients(trainer)
    assert all(inputs["in_baseline"].all() and inputs["row_scale"] == 1 for inputs in buffer)


# -------------------------------------------------------------------- rows that nobody scored


def test_a_row_that_nobody_scored_is_not_in_the_loss(tmp_path, policy_path):
    def even(completions, **kwargs):
        texts = [messages[-1]["content"] for messages in completions]
        return [None if len(text) == 3 else float(len(text) % 2 == 0) for text in texts]

    rows = ["x", "xx", "xxx", "xxx", "xxx", "xx", "x", "x"]
    options = {"env": None, "tools": [add], "reward_funcs": even, "model": policy_path, "beta": 0.1}
    trainer = answering(tmp_path, rows, **options)
    batch = scored_batch(trainer)
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert (mask.sum(dim=1) > 0).tolist() == [True, True, False, False, False, True, True, True]
    assert batch["num_items_in_batch"] == mask.sum()
    assert (batch["advantages"][:2, 0] * torch.tensor([-1, 1]) > 0).all()
    assert trainer._metrics["train"]["reward"] == [pytest.approx(2 / 5)]
    opened = scored_batch(answering(tmp_path, rows, loss_mask=False, **options))
    assert (opened["tool_mask"].sum(dim=1) > 0).tolist() == (mask.sum(dim=1) > 0).tolist()


# -------------------------------------------------------------------- truncated rows and statistics


WITH_CUTS = ["xx", "x", CUT, "xxxx", "x", CUT, "xx", "xxx"]


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (MultiTurnGRPOTrainer, {"advantage_estimator": "reinforce_pp", "gamma": 0.9}),
        (MultiTurnGRPOTrainer, {"advantage_estimator": "reinforce_pp_baseline"}),
        (MultiTurnPPOTrainer, {"critic": "head"}),
        (MultiTurnPPOTrainer, {"critic": "head", "advantage_estimator": "bilevel_gae", "advantage_mask": False}),
    ],
    ids=str,
)
def test_whitening_is_over_the_tokens_that_are_trained_on(tmp_path, trainer, options):
    batch = scored_batch(answering(tmp_path, WITH_CUTS, trainer=trainer, truncated_trajectories="mask", **options))
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (mask.sum(dim=1) == 0).tolist() == [what == CUT for what in WITH_CUTS]
    trained = batch["advantages"][mask].double()
    assert trained.mean().item() == pytest.approx(0, abs=1e-5)
    assert trained.std().item() == pytest.approx(1, abs=1e-3)
    if "value_mask" in batch:
        assert (batch["value_mask"].any(dim=1)).tolist() == mask.any(dim=1).tolist()


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "turn_grpo", "gigpo"])
def test_a_masked_trajectory_still_counts_in_its_group(tmp_path, estimator):
    kept = scored_batch(answering(tmp_path, WITH_CUTS, advantage_estimator=estimator))
    masked = scored_batch(answering(tmp_path, WITH_CUTS, advantage_estimator=estimator, truncated_trajectories="mask"))
    is_cut = torch.tensor([what == CUT for what in WITH_CUTS])
    torch.testing.assert_close(masked["advantages"][~is_cut], kept["advantages"][~is_cut])
    assert (masked["advantages"][is_cut] == 0).all()
    assert (kept["advantages"][is_cut] != 0).any()


def test_the_scale_of_a_reward_source_leaves_out_lost_rows(tmp_path):
    class Logged(AddEnv):
        def outcome_reward(self, trajectory):
            return 1.0

    rows = ["x", CUT, "x", CUT, LOST, LOST, LOST, LOST]
    options = {"env": Logged, "normalize_process_rewards": True, "scale_rewards": "none"}
    batch = scored_batch(answering(tmp_path, rows, **options))
    # A cut trajectory earned 0.5 for its call: over the four valid rows 0 .5 0 .5, std .288675, so that R is 1 or
    # 1 + .5 / .288675 = 2.732051. With the four lost rows the std would be .231455, and R 3.160247.
    expected = 3**0.5 / 2
    assert source_scales([{"tool_call": x} for x in (0.0, 0.5, 0.0, 0.5)]) == pytest.approx({"tool_call": 0.288675})
    assert batch["advantages"][:4, 0].tolist() == pytest.approx([-expected, expected, -expected, expected], abs=1e-5)


def test_the_scale_of_a_reward_source_is_not_that_of_rounding():
    def played(*turns):  # rewards of turns are added one by one
        paid = [SimpleNamespace(reward=reduce(operator.add, parts.values()), reward_parts=parts) for parts in turns]
        return SimpleNamespace(turns=paid)

    # All is attributed, and "way" leads back to where it began: of either is left 1e-16 in one, and 0 in the other.
    totals = [{"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.5}]
    assert reduce(operator.add, totals[0].values()) != math.fsum(totals[0].values())
    rows = [played({"way": 0.1}, {"way": 0.2}, {"way": -0.3}, totals[0]), played(totals[1])]
    assert source_scales(source_values(rows)) == {"": 1.0, "way": 1.0, **source_scales(totals)}


# -------------------------------------------------------------------- TRL's logs


def test_the_table_of_completions_shows_what_was_trained_on(tmp_path):
    options = {"advantage_estimator": "turn_grpo", "process_reward_weight": 0.5, "truncated_trajectories": "mask"}
    rows = ["xx", "x", CUT, "xxxx", LOST, CUT, "xx", "xxx"]
    trainer = answering(tmp_path, rows, log_completions=True, record_trajectories="jsonl", **options)
    trainer.train()
    (path,) = (tmp_path / "completions").glob("*.parquet")
    table = pd.read_parquet(path)
    expected = []
    for trajectory, what in zip(trainer.last_trajectories, rows, strict=True):
        trained = [a for a, m in zip(trajectory.advantages, trajectory.action_mask, strict=True) if m]
        expected.append(0.0 if what in (LOST, CUT) else sum(trained) / len(trained))
    assert table["advantage"].tolist() == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 4) for value in expected}) > 2
    rewards = [
        None if what == LOST else t.total_reward for t, what in zip(trainer.last_trajectories, rows, strict=True)
    ]
    found = [None if math.isnan(value) else value for value in table["environment_reward"]]
    assert found == pytest.approx(rewards)


@pytest.mark.parametrize("source", [{"env": AddEnv}, {"env": None, "tools": [add]}], ids=["environment", "tools"])
def test_the_reward_metrics_are_those_of_the_returns_that_were_trained_on(tmp_path, source):
    def length(completions, **kwargs):
        return [float(len(messages[-1]["content"])) if messages else 7.0 for messages in completions]

    rows = ["xx", "x", CUT, "xxxx", LOST, CUT, "xx", "xxx"]
    trainer = answering(
        tmp_path, rows, reward_funcs=[length], **source, truncated_trajectories="penalise", truncation_penalty=-0.25
    )
    batch = scored_batch(trainer)
    returns = torch.tensor([t.total_reward for t in trainer.last_trajectories])
    live = returns[[what != LOST for what in rows]]
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert logged["reward"] == pytest.approx(live.mean().item(), abs=1e-6)
    assert logged["reward_std"] == pytest.approx(live.std().item(), abs=1e-6)
    # Reward functions read a cut trajectory up to its call, whose text is empty.
    assert logged["rewards/length/mean"] == pytest.approx((2 + 1 + 0 + 4 + 0 + 2 + 3) / 7)
    assert logged["reward/outcome"] + logged["reward/process"] == pytest.approx(logged["reward"], abs=1e-6)
    assert not batch["in_baseline"][4]
    assert trainer.last_trajectories[4].total_reward == 0


def test_reward_metrics_by_hand():
    returns = torch.tensor([1.0, 1.0, 0.0, 2.0, float("nan"), 3.0])
    expected = {"reward": 7 / 5, "reward_std": 1.3**0.5, "frac_reward_zero_std": 1 / 3}
    assert return_metrics(returns, group_size=2, scale_rewards="group") == pytest.approx(expected)
    assert return_metrics(returns, group_size=2, scale_rewards="batch")["frac_reward_zero_std"] == 0
    assert return_metrics(returns, group_size=1, scale_rewards="group")["frac_reward_zero_std"] == 1
    assert nanstd(returns).item() == pytest.approx(1.3**0.5)
