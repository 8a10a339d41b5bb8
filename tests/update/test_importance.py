"""Ratios between trainer and sampler on ragged action masks."""

import math
import random

import pytest
import torch

from agent_r1_trl.update.importance import mismatch_metrics, sampling_ratio, weigh_mismatch
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

    async def noisy(*args, **kwargs):
        result = await generate(*args, **kwargs)
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
