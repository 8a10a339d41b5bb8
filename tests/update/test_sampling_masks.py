"""Sampling masks in one line say what a padded tensor says, and no token makes the others wider."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.trainers.saving import ROLLOUT_STATE
from agent_r1_trl.update.batches import join_rows, pad_rows, take_rows, trim_padding
from agent_r1_trl.update.entries import KEPT_IDS
from agent_r1_trl.update.kept_head import KeptLogProbs
from agent_r1_trl.update.packing import pack
from agent_r1_trl.update.rows import TrainingRows
from agent_r1_trl.update.sampling_masks import SamplingMasks
from tests.trainers.helpers import make_trainer, scored_batch


def random_lists(seed, num_rows, num_tokens, most=5):
    """(R, T) lists of ids, some of them empty."""
    rng = random.Random(seed)
    return [[sorted(rng.sample(range(30), rng.randrange(most))) for _ in range(num_tokens)] for _ in range(num_rows)]


def dense(lists, width=5):
    """(R, T, width), filled up with -1."""
    return torch.tensor([[ids + [-1] * (width - len(ids)) for ids in row] for row in lists], dtype=torch.int32)


def listed(masks):
    """The ids of each token in a list of its own, and those of a row."""
    return [[[one for one in ids if one >= 0] for ids in row] for row in masks.padded().tolist()]


@pytest.mark.parametrize("seed", range(5))
def test_rows_and_columns_are_chosen_as_those_of_a_padded_tensor(seed):
    lists = random_lists(seed, 4, 6)
    padded = dense(lists)
    masks = SamplingMasks.of(padded)
    assert listed(masks) == lists and masks.shape == (4, 6) and len(masks) == 4 and masks.dim() == 2
    for index in (
        slice(1, 3),
        torch.tensor([3, 0, 0]),
        torch.tensor([True, False, False, True]),
        torch.tensor([], dtype=torch.long),
        (slice(None), slice(2, 5)),
        (slice(None), slice(0, 0)),
    ):
        assert listed(masks[index]) == listed(SamplingMasks.of(padded[index])), index
    scored = torch.rand(4, 6) > 0.4
    assert [*masks[scored].padded().unsqueeze(0).tolist()] == SamplingMasks.of(padded[scored])[None].padded().tolist()
    wider = torch.nn.functional.pad(padded, (0, 0, 2, 1, 0, 3), value=-1)
    assert listed(masks.pad(left=2, right=1, below=3)) == listed(SamplingMasks.of(wider))


def test_rows_go_through_micro_batches_with_the_rest_of_the_batch():
    lists = random_lists(7, 5, 4)
    mask = torch.tensor([[1, 1, 1, 0]] * 5)
    batch = {
        "prompt_ids": torch.arange(10).view(5, 2), "prompt_mask": torch.ones(5, 2, dtype=torch.long),
        "completion_ids": torch.arange(20).view(5, 4), "completion_mask": mask,
        KEPT_IDS: SamplingMasks.of(dense(lists)),
    }  # fmt: skip
    parts = [take_rows(batch, torch.tensor([4, 2])), take_rows(batch, torch.tensor([0, 1, 3]))]
    joined = join_rows([pad_rows(part, {"completion_ids": 6, KEPT_IDS: 6}) for part in parts])
    want = [[*lists[row], [], []] for row in (4, 2, 0, 1, 3)]
    assert listed(joined[KEPT_IDS]) == want and joined["completion_ids"].shape == (5, 6)
    trimmed = trim_padding(joined | {"completion_mask": torch.nn.functional.pad(mask, (0, 2))})
    assert listed(trimmed[KEPT_IDS]) == [row[:3] for row in want]


def test_tokens_have_equal_numbers_where_their_ids_are_and_numbers_sort_as_ids_do():
    masks = SamplingMasks.of(dense([[[3, 300], [3], [], [3, 300], [3, 4], [256]]], width=2))
    assert masks.numbers().tolist() == [[3, 1, 0, 3, 2, 4]]


def test_a_band_is_at_most_twice_as_wide_as_its_tokens():
    counts = torch.tensor([0, 1, 16, 17, 32, 33, 20_000, 3, 0, 16_385])
    masks = SamplingMasks(counts.int(), torch.zeros(int(counts.sum()), dtype=torch.int32))
    assert [counts[band].tolist() for band in masks.bands()] == [[1, 16, 3], [17, 32], [33], [20_000, 16_385]]
    assert SamplingMasks.of(torch.full((2, 3), -1)).bands() == []


# ---------------------------------------------------------------- memory

WIDE, NUM_ROWS, NUM_TOKENS = 20_000, 16, 500


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that any operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for item in tree_leaves(found):
            if isinstance(item, torch.Tensor):
                self.num_bytes = max(self.num_bytes, item.numel() * item.element_size())
        return found


def with_one_wide_token(trainer):
    """Trajectories of one turn, each token of which was drawn from eight ids; a single one from 20,000."""
    scored_batch(trainer)
    [template, *_] = trainer.last_trajectories
    items = []
    for number in range(NUM_ROWS):
        lists = [[*range(8)]] * NUM_TOKENS
        if number == 3:
            lists = [*lists[:100], [*range(WIDE)], *lists[101:]]
        item = type(template).from_json(template.to_json())
        turn = item.turns[0]
        turn.start, turn.end, turn.kept_ids = 0, NUM_TOKENS, KeptIds.of(lists)
        item.completion_ids, item.logprobs = [number % 8] * NUM_TOKENS, [-1.0] * NUM_TOKENS
        item.authors, item.action_mask, item.turn_ids = ["policy"] * NUM_TOKENS, [1] * NUM_TOKENS, [0] * NUM_TOKENS
        item.turns, item.segments = [turn], []
        items.append(item)
    return items


def test_one_wide_token_makes_the_others_no_wider(tmp_path):
    """Padded, the entry of 16 x 500 tokens has 640 MB: 4 bytes for each of 20,000 ids of every token."""
    rows = TrainingRows(with_one_wide_token(make_trainer(tmp_path, max_turns=1)))
    places = torch.zeros(NUM_ROWS, NUM_TOKENS, dtype=torch.long)
    ids = torch.tensor([row.completion_ids for row in rows.rows])
    hidden = torch.randn(NUM_ROWS * NUM_TOKENS, 2, requires_grad=True)
    weight = torch.randn(WIDE, 2, requires_grad=True)
    with LargestTensor() as largest:
        masks = rows.kept_ids(places)
        batch = {"completion_ids": ids, KEPT_IDS: masks}
        halves = [take_rows(batch, torch.arange(16)[start::2]) for start in (0, 1)]
        joined = join_rows(halves)[KEPT_IDS]
        prompt = torch.ones(NUM_ROWS, 1, dtype=torch.long)
        packed = pack(
            torch.cat([prompt, ids], dim=1), torch.ones(NUM_ROWS, 501), places + 1, masks, share_prefixes=True
        )
        log_probs, entropy = KeptLogProbs.apply(hidden, weight, None, ids.flatten(), masks.flatten(), 1.0, None, 1.0)
        (log_probs.sum() + entropy.sum()).backward()
    num_ids = NUM_ROWS * NUM_TOKENS * 8 + WIDE - 8
    num_bytes = sum(x.numel() * x.element_size() for x in (masks.counts, masks.ids))
    assert num_bytes == 4 * (num_ids + NUM_ROWS * NUM_TOKENS) == 367_968
    assert joined.counts.sum() == num_ids and packed.kept_ids.counts.max() == WIDE
    assert largest.num_bytes < 5e6
    assert masks[3].counts[100] == WIDE and masks[3][99:102].padded()[2].tolist() == [*range(8), *[-1] * (WIDE - 8)]


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_rollout_in_flight_goes_on_with_its_masks(tmp_path, is_padded):
    """Also from a checkpoint that holds them as a padded tensor."""

    def trained(folder, checkpoint=None):
        trainer = make_trainer(
            tmp_path / folder, script=None, max_completion_length=16, top_p=0.8, steps_per_generation=2,
            per_device_train_batch_size=4, max_steps=2, save_strategy="steps", save_steps=1, journal=False,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model.state_dict()

    whole = trained("run")
    checkpoint = tmp_path / "run" / "checkpoint-1"
    if is_padded:
        path = checkpoint / ROLLOUT_STATE.format(rank=0)
        state = torch.load(path, weights_only=True)
        for inputs in state["buffered_inputs"]:
            inputs[KEPT_IDS] = inputs[KEPT_IDS].padded()
        torch.save(state, path)
        (checkpoint / "checkpoint_manifest.json").unlink()  # the file has another size
    again = trained("again", str(checkpoint))
    for name, value in whole.items():
        assert torch.equal(again[name], value), name


def test_a_row_without_scored_tokens_has_masks_without_numbers():
    """A dummy row, on a rank that has nothing to train on."""
    assert SamplingMasks.of(torch.zeros(0, 3, dtype=torch.long)).numbers().tolist() == []
