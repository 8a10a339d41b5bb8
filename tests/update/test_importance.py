"""Ratios between trainer and sampler on ragged action masks."""

import math
import random

import pytest
import torch
from accelerate import Accelerator

from agent_r1_trl.update.importance import mismatch_metrics, sampling_ratio, weigh_mismatch, weight_metrics
from tests.trainers.helpers import make_trainer, scored_batch

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
TURNS = torch.tensor([[0, 0, -1, -1, 1, 1, -1], [0, -1, -1, -1, -1, -1, -1], [-1] * 7])
DIFFERENCE = torch.tensor([[0.1, 0.3, NAN, 9.0, -0.2, -0.4, 5.0], [0.7, NAN, 1.0, 1.0, 1.0, 1.0, 1.0], [NAN] * 7])


def naive(unit):
    rows = []
    for logs, mask, turns in zip(DIFFERENCE.tolist(), MASK.tolist(), TURNS.tolist(), strict=True):
        row = []
        for t in range(7):
            if not mask[t]:
                row.append(1.0)
                continue
            same = [u for u in range(7) if mask[u] and (unit == "sequence" or turns[u] == turns[t])]
            same = [t] if unit == "token" else same
            total = sum(logs[u] for u in same)
            row.append(math.exp(total))
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("unit", ["token", "turn", "sequence"])
def test_ratios_agree_with_a_naive_loop_and_are_1_at_mask_0(unit):
    ratio = sampling_ratio(DIFFERENCE, MASK, TURNS, unit=unit)
    torch.testing.assert_close(ratio, naive(unit))
    assert (ratio[MASK == 0] == 1).all()


def test_a_token_the_engine_could_not_score_counts_as_1():
    difference = torch.tensor([[NAN, 0.5]])
    ones = torch.ones(1, 2)
    ratio = sampling_ratio(difference, ones, torch.zeros(1, 2, dtype=torch.long), unit="sequence")
    assert ratio.tolist() == [[pytest.approx(math.exp(0.5))] * 2]


def test_bounds_cut_or_drop_the_whole_unit():
    options = {"unit": "turn", "bounds": (0.7, 1.4)}
    cut = sampling_ratio(DIFFERENCE, MASK, TURNS, **options)[0]
    assert cut.tolist() == pytest.approx([1.4, 1.4, 1, 1, 0.7, 0.7, 1])
    dropped = sampling_ratio(DIFFERENCE, MASK, TURNS, **options, is_masked=True)[0]
    assert dropped.tolist() == pytest.approx([0, 0, 1, 1, 0, 0, 1])


def test_a_small_drift_of_every_token_drops_a_long_sequence_and_no_token():
    """.005 a token: exp(.005 * 200) = 2.7 is below 3, exp(.005 * 300) = 4.5 is above it."""
    difference = torch.full((2, 300), 0.005)
    mask = torch.ones(2, 300)
    mask[0, 200:] = 0
    turns = torch.where(mask > 0, 0, -1)
    dropped = sampling_ratio(difference, mask, turns, unit="sequence", bounds=(None, 3.0), is_masked=True)
    assert dropped[:, 0].tolist() == [pytest.approx(math.e), 0.0] and dropped[1].sum() == 0
    kept = sampling_ratio(difference, mask, turns, unit="token", bounds=(None, 2.0))
    torch.testing.assert_close(kept[mask > 0], torch.full((500,), math.exp(0.005)))
    dropped_share = weight_metrics(dropped, mask > 0, Accelerator(cpu=True))
    assert dropped_share["sampling/zero_weight_rows"] == 0.5
    assert dropped_share["sampling/effective_rows"] == pytest.approx(0.5)
    assert dropped_share["sampling/effective_tokens"] == pytest.approx(200 / 500)
    kept_share = weight_metrics(kept, mask > 0, Accelerator(cpu=True))
    assert [*kept_share.values()] == pytest.approx([0.0, 1.0, 1.0])


def test_the_effective_sample_size_is_the_sum_squared_over_the_sum_of_squares():
    weights = torch.tensor([[2.0, 1.0, 9.0, 9.0], [0.0, 0.0, 0.0, 9.0], [0.5, 0.0, 1.0, 9.0], [9.0] * 4])
    in_loss = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()
    found = weight_metrics(weights, in_loss, Accelerator(cpu=True))
    # Tokens 2 1 | 0 0 0 | .5 0 1: sum 4.5, squares 4 + 1 + .25 + 1 = 6.25. Rows 1.5, 0, .5: sum 2, squares 2.5.
    assert found == {
        "sampling/zero_weight_rows": pytest.approx(1 / 3),
        "sampling/effective_rows": pytest.approx(2**2 / (3 * 2.5)),
        "sampling/effective_tokens": pytest.approx(4.5**2 / (8 * 6.25)),
    }
    nothing = weight_metrics(torch.zeros(2, 3), torch.ones(2, 3).bool(), Accelerator(cpu=True))
    assert [*nothing.values()] == [1.0, 0.0, 0.0]
    assert all(map(math.isnan, weight_metrics(weights, in_loss & False, Accelerator(cpu=True)).values()))


def test_the_mismatch_is_a_mean_by_turn_over_action_tokens():
    found = mismatch_metrics(DIFFERENCE, MASK, TURNS)
    first, second = [0.1, 0.3, 0.7], [-0.2, -0.4]
    expected = [sum(map(math.exp, values)) / len(values) for values in (first, second)]
    assert found == {f"sampling/ratio_turn_{turn}": pytest.approx(value) for turn, value in enumerate(expected)}


def with_sampler_noise(tmp_path, **options):
    """A trainer whose sampler reports log-probs that differ from the trainer's."""
    rng = random.Random(0)
    trainer = make_trainer(tmp_path, use_vllm=True, **options)
    generator = trainer.rollouts._generator
    generate = generator.generate

    async def noisy(request):
        result = await generate(request)
        result.logprobs = [-8.0 + rng.random() for _ in result.token_ids]
        return result

    generator.generate = noisy
    return trainer


def test_the_trainer_weighs_turns_as_the_function_says(tmp_path):
    trainer = with_sampler_noise(
        tmp_path, importance_sampling_unit="turn",
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0,
    )  # fmt: skip
    batch = scored_batch(trainer)
    mask = batch["tool_mask"] * batch["completion_mask"]
    turn_ids = torch.full_like(mask, -1)
    for row, trajectory in enumerate(trainer.last_trajectories):
        turn_ids[row, : len(trajectory.turn_ids)] = torch.tensor(trajectory.turn_ids)
    difference = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
    expected = sampling_ratio(difference, mask, turn_ids, unit="turn", bounds=(None, 2.0))
    torch.testing.assert_close(batch["importance_sampling_ratio"], expected)
    assert (expected[mask == 1] != 1).any()
    assert {"sampling/ratio_turn_0", "sampling/ratio_turn_1"} <= set(trainer._metrics["train"])
    assert torch.isfinite(trainer.compute_loss(trainer.model, batch))


@pytest.mark.parametrize("rollouts_ahead", [1, 0])
def test_long_rows_keep_their_weight_where_the_sampler_is_an_update_behind(tmp_path, rollouts_ahead):
    """Every token is .6 likelier now: a row of two or more has a ratio above 3, and a token has exp(.6) = 1.8."""
    trainer = make_trainer(tmp_path, use_vllm=True, rollouts_ahead=rollouts_ahead)
    trainer._log_probs = lambda model, output: output["sampling_per_token_logps"] + 0.6
    batch = scored_batch(trainer)
    in_loss = (batch["completion_mask"] * batch["tool_mask"]).bool()
    ratios = batch["importance_sampling_ratio"][in_loss]
    torch.testing.assert_close(ratios, torch.full_like(ratios, math.exp(0.6) if rollouts_ahead else 0.0))
    found = {name: trainer._metrics["train"][f"sampling/{name}"] for name in ("zero_weight_rows", "effective_tokens")}
    share = 1.0 if rollouts_ahead else 0.0
    assert found == {"zero_weight_rows": [1 - share], "effective_tokens": [pytest.approx(share)]}


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_rows_out_of_the_loss_are_not_in_the_metrics_and_nothing_is_known_of_none(tmp_path, mode):
    trainer = with_sampler_noise(tmp_path, vllm_importance_sampling_mode=mode)
    batch = scored_batch(trainer)
    rows, names = trainer.last_batch.training_rows, ("min", "mean", "max")

    def found(num_rows):
        batch["tool_mask"][num_rows:] = 0
        metrics = weigh_mismatch(batch, rows, trainer.args, trainer.accelerator)
        return [metrics[f"sampling/importance_sampling_ratio/{name}"] for name in names]

    least, mean, most = found(2)
    ratios = batch["importance_sampling_ratio"][:2]
    in_loss = (batch["completion_mask"] * batch["tool_mask"])[:2].bool()
    ratios = ratios[in_loss] if mode == "token_truncate" else ratios.gather(1, in_loss.int().argmax(1, keepdim=True))
    torch.testing.assert_close([least, mean, most], [ratios.min().item(), ratios.mean().item(), ratios.max().item()])
    assert all(map(math.isnan, found(0)))
