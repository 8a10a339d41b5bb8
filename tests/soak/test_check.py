"""The soak's own checks find what they look for."""

import json

import pytest
import torch
from safetensors.torch import save_file

from agent_r1_trl.journal.records import VERSION, Appender, checksum_ids, pack_floats, pack_ids
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.trajectory import StopReason
from tests.recording.examples import two_turns
from tests.soak.check import problems_of
from tests.soak.plan import MAX_STEPS, Plan, draw_plan

PLAN = Plan(seed=0, sampler="scripted", trainer="grpo", num_ranks=1, overlap=False, record="jsonl", faults=())


@pytest.fixture
def folder(tmp_path):
    """What a good run of three steps leaves behind: three of four trajectories played, one failed."""
    failed = two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR, error="down")
    for step in range(1, MAX_STEPS + 1):
        TrajectoryStore(tmp_path).write(step, [two_turns(), two_turns(), two_turns(), failed])
        add_line(tmp_path / "steps.jsonl", {"step": step, "rollout/infrastructure_failure_share": 0.25})
    item = two_turns()
    for turn in item.turns:
        prompt = [*item.prompt_ids, *item.completion_ids[: turn.start]]
        sampled = [item.completion_ids[turn.start : turn.end], item.logprobs[turn.start : turn.end]]
        add_line(tmp_path / "samples_rank0.jsonl", [prompt, *sampled])
    (tmp_path / "final").mkdir()
    save_file({"weight": torch.zeros(2)}, tmp_path / "final" / "model.safetensors")
    (tmp_path / "rank0.log").write_text("nothing to say\n")
    return tmp_path


def add_line(path, value):
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def test_nothing_is_wrong_with_a_good_run(folder):
    assert problems_of(PLAN, folder) == []


@pytest.mark.parametrize(
    "change",
    [
        {"completion_ids": [11, 99, 13, 14, 15, 16, 17, 18]},  # a sampled id
        {"completion_ids": [11, 12, 13, 99, 15, 16, 17, 18]},  # an id that the second turn was sampled after
        {"prompt_ids": [5, 6, 8]},
        {"logprobs": [-0.1, -0.5, 0.0, 0.0, 0.0, 0.0, -1e-17, -12.345678901234567]},
    ],
)
def test_a_trajectory_that_was_not_sampled_like_this_is_found(folder, change):
    TrajectoryStore(folder, rank=1).write(1, [two_turns(**change)])
    assert any("the sampler never said this" in problem for problem in problems_of(PLAN, folder))


def test_a_turn_of_the_journal_that_was_not_sampled_like_this_is_found(folder):
    turn = {"t": 0, "kind": "turn", "turn": 0, "seed": 1, "max_tokens": 9, "context": checksum_ids([5, 6, 7])}
    turn |= {"ids": pack_ids([11, 12]), "logprobs": pack_floats([-0.1, -1 / 3]), "stop": True}
    journal = Appender(folder / "journal" / "rank0" / "rollout_000000000.journal")
    for record in ({"kind": "rollout", "version": VERSION, "size": 1}, {"t": 0, "kind": "start", "request": {}}, turn):
        journal.append(record)
    assert problems_of(PLAN, folder) == []
    journal.append(turn | {"turn": 1, "context": checksum_ids([5, 6, 8])})
    (problem,) = problems_of(PLAN, folder)
    assert problem.endswith("trajectory 0, turn 1: the sampler never said this")


def test_a_trajectory_that_is_not_recorded_is_found_unless_the_run_says_so(folder):
    (folder / "trajectories" / "step_000002.jsonl").unlink()
    assert problems_of(PLAN, folder) == ["step 2: 0 of 4 trajectories recorded, and nothing said of it"]
    (folder / "rank0.log").write_text("4 trajectories could not be recorded: the disk is full\n")
    assert problems_of(PLAN, folder) == []


def test_a_step_that_is_missing_is_found(folder):
    lines = (folder / "steps.jsonl").read_text().splitlines()
    (folder / "steps.jsonl").write_text("\n".join(lines[:-1]))
    assert problems_of(PLAN, folder) == ["logged steps: [1, 2]"]


def test_failures_that_are_not_counted_are_found(folder):
    add_line(folder / "steps.jsonl", {"step": 3, "rollout/infrastructure_failure_share": 0.0})
    assert problems_of(PLAN, folder) == ["step 3: 0.25 of the trajectories failed, 0 is logged"]


def test_weights_that_are_not_finite_or_not_whole_are_found(folder):
    save_file({"weight": torch.tensor([0.0, float("nan")])}, folder / "final" / "model.safetensors")
    assert problems_of(PLAN, folder) == ["final/model.safetensors: 1 tensors are not finite"]
    (folder / "final" / "model.safetensors").write_bytes(b"torn")
    assert "final/model.safetensors cannot be read" in problems_of(PLAN, folder)[0]


def test_weights_that_the_sampler_does_not_have_are_found(folder):
    add_line(
        folder / "steps.jsonl",
        {"step": 3, "rollout/infrastructure_failure_share": 0.25, "sampling/sampling_logp_difference/max": 2.2},
    )
    assert problems_of(PLAN, folder) == ["step 3: sampler and trainer differ by 2.2"]


def test_twenty_seeds_draw_every_sampler_and_two_hundred_every_fault():
    plans = [draw_plan(seed) for seed in range(200)]
    assert {plan.sampler for plan in plans[:20]} == {"scripted", "transformers", "server", "engine"}
    from tests.soak import plan as faults

    drawn = {fault for plan in plans for fault in plan.faults}
    assert drawn == {
        *faults.IN_THE_TASK, *faults.IN_THE_NUMBERS, *faults.ON_DISK, *faults.SIGNALS, *faults.ON_SERVERS
    }  # fmt: skip
