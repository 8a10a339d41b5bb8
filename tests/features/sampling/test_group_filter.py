"""What leaves the update with `filter_groups`, what the rest is divided by, and which steps are not made at all."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.features.sampling.rules import raw_returns
from agent_r1_trl.testing import AddEnv, make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig, MultiTurnPPOTrainer
from agent_r1_trl.update.batches import join_rows, take_rows
from agent_r1_trl.update.dealing import deal, plan_deal
from agent_r1_trl.update.entries import IS_KEPT, TRAJECTORY_ROW
from agent_r1_trl.update.exchange import DUMMY
from agent_r1_trl.update.layout import UPDATE_LAYOUTS
from tests.trainers.helpers import (
    CUT,
    LOST,
    answering,
    make_trainer,
    move_weights,
    same,
    scored_batch,
    step_gradients,
    unfold,
    watched,
)

LOSS_TYPES = ("grpo", "dr_grpo", "sapo", "luspo", "bnpo", "dapo", "cispo", "vespo")
ROWS = ["xx", "xxxxxx", "xx", "xxxxxxxx", "x", "xxxx", "x", "xx", "x", "x", "xxx", "x", "xxxx", "xx", LOST, "x"]
"""Four groups of four, an even number of letters is right: stds 0 .577 0 .577."""
KEPT = [4, 5, 6, 7, 12, 13, 15]
SIZES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_iterations": 2}
HALF = {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5}
QUARTER = {"sampling.filter_groups": "top_fraction"}


def trainer_of(tmp_path, rows=ROWS, **options):
    return answering(tmp_path, rows, **SIZES | options)


WHITENED = {
    "gae": {"trainer": MultiTurnPPOTrainer, "critic": "head"},
    "bilevel_gae": {"trainer": MultiTurnPPOTrainer, "critic": "head"},
    "step_gae": {"trainer": MultiTurnPPOTrainer, "critic": "head"},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
}


@pytest.mark.parametrize("estimator", WHITENED)
def test_advantages_are_whitened_over_the_rows_that_are_trained_on(tmp_path, estimator):
    options = {"num_generations": 4, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    options |= {"advantage_estimator": estimator, "num_iterations": 1, **WHITENED[estimator]}
    found = scored_batch(trainer_of(tmp_path / "all", **options))
    output = scored_batch(trainer_of(tmp_path / "some", **options, **HALF))
    mask = output["tool_mask"].bool() & output["completion_mask"].bool()  # (16, T)
    if estimator == "step_gae":  # one number for each turn, and here for each row
        mask = mask & (mask.cumsum(dim=1) == 1)
    kept = mask & output["is_kept"].unsqueeze(1)
    assert 0 < kept.sum() < mask.sum()
    plain, filtered = found["advantages"], output["advantages"]
    std, mean = torch.std_mean(plain[kept].double())
    assert abs(mean) + abs(std - 1) > 0.02, "the rows that are kept are not like all the others"
    expected = (plain.double() - mean) / std  # whitening what is white already keeps no trace of the first time
    torch.testing.assert_close(filtered[mask].double(), expected[mask], atol=1e-5, rtol=1e-5)
    assert filtered[kept].mean().abs() < 1e-5 and (filtered[kept].std() - 1).abs() < 1e-5
    if "returns" in found:
        torch.testing.assert_close(output["returns"], found["returns"], rtol=0, atol=0)


def real_rows(buffer):
    """The rows that are no dummies, of all micro-batches."""
    return sorted(row for inputs in buffer for row in inputs[TRAJECTORY_ROW][inputs["in_baseline"]].tolist())


def reference_gradients(trainer, loss_type, parts):
    """Of an unfiltered trainer whose optimizer step has these micro-batches and no others."""
    trainer.loss_type = loss_type
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(parts)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    move_weights(trainer.model)
    trainer.model.zero_grad()
    for part in parts:
        trainer.compute_loss(trainer.model, part).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.model.load_state_dict(before)
    return gradients


def without_scales(inputs):
    return {name: value for name, value in inputs.items() if name not in ("row_scale", "micro_batch_scale")}


def kept_part(plain_buffer, kept=KEPT):
    """Some rows of an unfiltered rollout in one micro-batch, as if the others had never been."""
    rows = join_rows([without_scales(inputs) for inputs in plain_buffer])
    order = {int(number): index for index, number in enumerate(rows[TRAJECTORY_ROW])}
    part = take_rows(rows, torch.tensor([order[number] for number in kept]))
    part["num_items_in_batch"] = (part["completion_mask"] * part["tool_mask"]).sum()
    if "value_mask" in part:
        part["num_value_items"] = part["value_mask"].sum()
    return part


def assert_same_gradients(found, expected, message=""):
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: f"{message} {name}: {text}"
        )


# -------------------------------------------------------------------- the gradient


def test_for_every_loss_type_the_gradient_is_that_of_a_trainer_fed_with_the_kept_rows(tmp_path):
    make_policy(make_tokenizer("qwen3")).save_pretrained(tmp_path / "policy")
    options = {"model": str(tmp_path / "policy"), "beta": 0.1}
    plain = trainer_of(tmp_path, **options)
    _, everything = step_gradients(plain)
    filtered = trainer_of(tmp_path, **options, **HALF)
    for loss_type in LOSS_TYPES:
        filtered.loss_type = loss_type
        torch.manual_seed(5)
        gradients, buffer = step_gradients(filtered)
        assert real_rows(buffer) == KEPT
        assert [len(inputs["in_baseline"]) for inputs in buffer] == [4, 3]
        parts = [kept_part(everything)]
        if loss_type == "bnpo":  # a mean over the tokens of each micro-batch
            parts = [kept_part(everything, inputs[TRAJECTORY_ROW].tolist()) for inputs in buffer]
        assert_same_gradients(gradients, reference_gradients(plain, loss_type, parts), loss_type)


@pytest.mark.parametrize("layout", UPDATE_LAYOUTS[1:])
def test_in_every_layout_the_gradient_is_that_of_the_kept_rows(tmp_path, layout):
    plain = trainer_of(tmp_path)
    expected = reference_gradients(plain, "grpo", [kept_part(step_gradients(plain)[1])])
    filtered = trainer_of(tmp_path, update_layout=layout, loss_type="grpo", **HALF)
    assert_same_gradients(step_gradients(filtered)[0], expected)


@pytest.mark.parametrize("layout, loss_type, bonus", [("padded", "bnpo", 0.1), ("shared", "grpo", 0.0)])
def test_micro_batches_that_no_row_is_left_for_have_a_dummy_without_loss(tmp_path, layout, loss_type, bonus):
    """One group of three rows for four micro-batches."""
    options = {"loss_type": loss_type, "entropy_coef": bonus}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    rows = [*ROWS[:4], *["xx"] * 8, *ROWS[12:]]
    filtered = trainer_of(
        tmp_path, rows, sampling={"filter_groups": "min_p", "filter_value": 1.0}, update_layout=layout, **options
    )
    gradients, buffer = step_gradients(filtered)
    assert sorted(int(inputs["in_baseline"].sum()) for inputs in buffer) == [0, 1, 1, 1]
    assert [len(inputs["in_baseline"]) for inputs in buffer] == [1] * 4
    plain = trainer_of(tmp_path, rows, **options)
    _, everything = step_gradients(plain)
    parts = [kept_part(everything, [row]) for row in (12, 13, 15)]
    assert_same_gradients(gradients, reference_gradients(plain, loss_type, parts))


def test_policy_and_critic_train_on_the_kept_rows(tmp_path):
    options = {"trainer": MultiTurnPPOTrainer, "num_generations": 4, "critic": "head", "whiten_advantages": False}
    plain = trainer_of(tmp_path, **options)
    _, everything = step_gradients(plain)
    gradients, buffer = step_gradients(trainer_of(tmp_path, **options, **HALF))
    assert sum(len(inputs["in_baseline"]) for inputs in buffer) == 7
    assert_same_gradients(gradients, reference_gradients(plain, "dapo", [kept_part(everything)]))


def test_the_loss_is_multiplied_by_the_kept_share_if_asked(tmp_path):
    full, _ = step_gradients(trainer_of(tmp_path, **HALF))
    scaled, _ = step_gradients(trainer_of(tmp_path, sampling={"filter_loss_scaling": True}, **HALF))
    assert_same_gradients(scaled, {name: gradient * 7 / 15 for name, gradient in full.items()})


# -------------------------------------------------------------------- what is chosen


def test_returns_are_raw_and_of_the_baseline(tmp_path):
    """Two cut trajectories earn .5 for their call; the penalty of one group for truncation is no spread."""
    rows = [CUT, "xx", CUT, LOST, "xx", "xx", "xx", "xx"]
    options = {"truncated_trajectories": "penalise", "truncation_penalty": -0.5, "per_device_train_batch_size": 8}
    trainer = trainer_of(tmp_path, rows, gradient_accumulation_steps=1, **options, **HALF)
    batch = scored_batch(trainer)
    returns = raw_returns(trainer.last_trajectories)
    paid = [item.total_reward for item in trainer.last_trajectories]
    assert [round(paid[i] - float(returns[i]), 6) for i in (0, 1, 2)] == [-0.5, 0.0, -0.5]
    assert returns[3].isnan() and not returns[4:].isnan().any()
    assert batch["is_kept"].tolist() == [True, True, True, False, False, False, False, False]
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("filter/")}
    assert metrics == {
        "filter/kept_share": pytest.approx(3 / 7),
        "filter/signal_to_noise": pytest.approx(math.sqrt(2)),
        "filter/is_applied": 1.0,
    }


def test_the_gate_leaves_rollouts_alone_whose_groups_vary_alike(tmp_path):
    """Variances 0 .333 0 .333 (three members): std / mean = 1.1547."""
    plain, _ = step_gradients(trainer_of(tmp_path))
    shut = trainer_of(tmp_path, sampling={"filter_when": 1.16}, **HALF)
    gradients, buffer = step_gradients(shut)
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)
    assert "is_kept" not in buffer[0]
    assert shut._metrics["train"]["filter/is_applied"] == [0.0]
    assert shut._metrics["train"]["filter/kept_share"] == [1.0]
    ratio = shut._metrics["train"]["filter/signal_to_noise"][0]
    opened = trainer_of(tmp_path, sampling={"filter_when": ratio - 0.01}, **HALF)
    assert real_rows(step_gradients(opened)[1]) == KEPT


# -------------------------------------------------------------------- steps without signal


class PaidByStep(AddEnv):
    """In some optimizer steps every trajectory earns the same."""

    flat_steps: tuple = ()
    trainer = None

    def outcome_reward(self, trajectory):
        return 1.0 if self.trainer.state.global_step in self.flat_steps else float(len(trajectory.final_text) % 2)


def paid_trainer(tmp_path, flat, **options):
    class Env(PaidByStep):
        flat_steps = flat

    Env.trainer = make_trainer(tmp_path, **{"env": Env, "script": words, "weight_decay": 0.1} | options)
    return Env.trainer


def words(rng, turn):
    return say("x" * rng.randrange(1, 9))


@pytest.mark.parametrize(
    "options",
    [
        HALF,
        {
            "sampling.filter_groups": "top_p",
            "sampling.filter_when": 100.0,
        },  # the gate is shut, and still there is nothing to train on
        pytest.param(
            HALF | {"trainer": MultiTurnPPOTrainer, "peft_config": LoraConfig(r=2), "critic": "adapter"},
            marks=pytest.mark.matrix,
        ),
        HALF | {"trainer": MultiTurnPPOTrainer, "critic": "model"},
        HALF | {"update_layout": "packed", "max_tokens_per_micro_batch": 300, "gradient_accumulation_steps": 2},
    ],
    ids=["grpo", "gate", "ppo", "ppo model", "by tokens"],
)
def test_a_step_without_signal_changes_nothing_and_is_counted_and_said_once(tmp_path, caplog, options):
    trainer = paid_trainer(tmp_path, (1, 2), max_steps=4, num_generations=4, **options)
    states = watched(trainer)
    changed = [not same(a, b) for a, b in itertools.pairwise(states)]
    assert changed == [True, False, False, True]
    logged = [entry.get("filter/skipped_steps") for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [None, 1, 2, 2]
    assert ["grad_norm" in entry for entry in trainer.state.log_history if "loss" in entry] == changed
    assert trainer.features["numbers"].num_skipped == 0
    said = [record.getMessage() for record in caplog.records if "filter/skipped_steps" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("Optimizer step 2 was skipped, because GroupFilter.keep left")


def test_a_step_without_signal_leaves_the_adaptive_entropy_bonus_alone(tmp_path):
    bonus = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.01}
    trainer = paid_trainer(tmp_path, (1, 2), max_steps=4, num_generations=4, **HALF, **bonus)
    trainer.train()
    assert trainer.kept_rows.num_skipped == 2
    logged = [entry["entropy_coef"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([0.09, 0.09, 0.09, 0.08])  # lower, because the entropy is above its target


BY_TOKENS = {"update_layout": "shared", "max_tokens_per_micro_batch": 300}


@pytest.mark.parametrize("layout", [{}, BY_TOKENS], ids=["padded", "by tokens"])
def test_an_optimizer_step_of_two_rollouts_is_skipped_only_if_both_teach_nothing(tmp_path, layout):
    """The rollouts 0 and 1 make the first step, 2 and 3 the second; only 1, 2 and 3 are flat."""
    options = {"steps_per_generation": 1, **layout, **HALF}
    trainer = paid_trainer(tmp_path, (), max_steps=2, gradient_accumulation_steps=2, **options)
    numbers = itertools.count()
    keep = trainer.features["group_filter"].keep

    def flat_from_the_second_on(batch):
        if next(numbers):
            for trajectory in batch.trajectories:
                trajectory.outcome_reward = 1.0
        return keep(batch)

    trainer.features["group_filter"].keep = flat_from_the_second_on
    states = watched(trainer)
    assert [not same(a, b) for a, b in itertools.pairwise(states)] == [True, False]
    assert trainer.kept_rows.num_skipped == 1
    alone = paid_trainer(tmp_path, (), max_steps=1, **options)
    alone.train()
    norms = [run.state.log_history[0]["grad_norm"] for run in (trainer, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), "a mean over the rollouts that have signal"


def test_steps_that_no_row_is_left_for_are_skipped_and_the_others_are_means_over_theirs(tmp_path):
    """Two kept rows, four optimizer steps of one micro-batch of a rollout."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 4}
    rows = ["xx", "x", "xx", "xx", "x", "x", "xx", "xx"]
    trainer = trainer_of(tmp_path, rows, num_generations=2, num_iterations=1, max_steps=4, **options, **QUARTER)
    seen, compute_loss = [], trainer._compute_loss

    def note(model, inputs):
        seen.append((inputs, compute_loss(model, inputs)))
        return seen[-1][1]

    trainer._compute_loss = note
    states = watched(trainer)
    assert [not same(a, b) for a, b in itertools.pairwise(states)] == [True, True, False, False]
    assert trainer.kept_rows.num_skipped == 2
    inputs, loss = seen[0]
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    # On policy all ratios are 1: the loss is minus the mean advantage over tokens, of which both steps have as many.
    assert loss.item() == pytest.approx(-(inputs["token_advantages"] * mask).sum().item() / mask.sum().item(), rel=0.2)


def test_it_filters_what_was_rolled_out_ahead(tmp_path):
    options = {"rollouts_ahead": 1, "max_steps": 3, "steps_per_generation": 2}
    trainer = paid_trainer(tmp_path, (), per_device_train_batch_size=4, **options, **HALF)
    trainer.train()
    assert trainer._buffered_inputs[0]["completion_ids"].shape[0] == 2
    assert "row_index" not in trainer._buffered_inputs[0]


# -------------------------------------------------------------------- spreading


class OneRank:
    process_index, num_processes = 0, 1

    def gather(self, values):
        return values


@pytest.mark.parametrize(
    "arguments, plan",
    [
        ((5, 4, 2), [[0, 4], [2], [1], [3]]),
        ((2, 4, 1), [[0], [1], [DUMMY], [DUMMY]]),
        ((3, 4, 4), [[0], [1], [2], [DUMMY]]),
        ((3, 2, 4), [[0, 2], [1]]),  # two rollouts an optimizer step
        ((0, 2, 1), [[DUMMY], [DUMMY]]),
    ],
)
def test_optimizer_steps_take_turns(arguments, plan):
    num_rows, num_micro_batches, steps_per_update = arguments
    ranks = [(range(num_rows), [True] * num_rows, num_rows)]
    found, _ = plan_deal(ranks, num_micro_batches, steps_per_update, in_turns=True)
    assert found == [plan]


def test_rows_keep_their_tokens_and_lose_the_padding_of_the_others():
    rows = {
        "prompt_ids": torch.tensor([[1, 2, 3], [9, 9, 4], [9, 5, 6]]),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[1, 2, 3], [7, 9, 9], [8, 8, 9]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        "tool_mask": torch.ones(3, 3).long(),
        "scalar": torch.tensor(7),
        "none": None,
    }
    rows |= {IS_KEPT: torch.tensor([False, True, True]), "in_baseline": torch.tensor([True, True, True])}
    args = SimpleNamespace(steps_per_generation=3, gradient_accumulation_steps=1)
    buffer = deal(rows, torch.arange(3), torch.arange(3), args=args, accelerator=OneRank())
    assert [bool(inputs["has_signal"]) for inputs in buffer] == [True, True, False]
    assert [inputs["prompt_ids"].tolist() for inputs in buffer] == [[[9, 4]], [[5, 6]], [[2, 3]]]
    assert [inputs["completion_ids"].tolist() for inputs in buffer] == [[[7, 9]], [[8, 8]], [[1, 2]]]
    assert buffer[2]["prompt_mask"].tolist() == [[0, 1]] and buffer[2]["completion_mask"].tolist() == [[1, 0]]
    assert buffer[2]["tool_mask"].tolist() == [[0, 0]] and buffer[1]["tool_mask"].tolist() == [[1, 1]]
    assert all(inputs["scalar"] == 7 and inputs["none"] is None for inputs in buffer)


# -------------------------------------------------------------------- settings


GRPO, PPO = MultiTurnGRPOConfig, MultiTurnPPOConfig
GROUPS, VALUE, WHEN = "sampling.filter_groups", "sampling.filter_value", "sampling.filter_when"
REFUSED = [
    (GRPO, {GROUPS: "min_p"}, VALUE, {VALUE: 0.5}),
    (GRPO, HALF | {VALUE: 0.0}, VALUE, {VALUE: 0.5}),
    (GRPO, HALF | {WHEN: -1.0}, WHEN, {WHEN: 0.5}),
    (GRPO, HALF | {"fp16": True}, "fp16", {"fp16": False}),
    (PPO, HALF, "num_generations", {"num_generations": 2}),
]


@pytest.mark.parametrize("config_class, options, name, fix", REFUSED, ids=str)
def test_what_cannot_be_filtered_is_refused_and_the_fix_works(config_class, options, name, fix):
    common = {"output_dir": "unused", "bf16": False, "use_cpu": True}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        config_class(**unfold(common | options))
    config_class(**unfold(common | options | fix))
