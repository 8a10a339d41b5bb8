"""The soak's own checks find what they look for."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from agent_r1_trl.advantages import estimators
from agent_r1_trl.features.journal.records import VERSION, Appender, checksum_ids, pack_floats, pack_ids
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.rollout.env_session import EnvSession
from agent_r1_trl.trainers import credit, multi_turn
from agent_r1_trl.trajectory import StopReason
from tests.recording.examples import two_turns
from tests.soak import __main__ as soak
from tests.soak import agent
from tests.soak import plan as faults
from tests.soak.check import problems_of
from tests.soak.plan import MAX_STEPS, Plan, draw_plan

PPO = Plan(seed=0, sampler="scripted", trainer="ppo", num_ranks=1, rollouts_ahead=0, faults=("scoring crashes",))
PLAN = Plan(seed=0, sampler="scripted", trainer="grpo", num_ranks=1, rollouts_ahead=0, faults=())


@pytest.fixture
def folder(tmp_path):
    """What a good run of three steps leaves behind: three of four trajectories sampled, one failed."""
    failed = two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR, error="down")
    for step in range(1, MAX_STEPS + 1):
        TrajectoryStore(tmp_path).write(step, [two_turns(), two_turns(), two_turns(), failed])
        add_line(tmp_path / "steps.jsonl", {"step": step, "rollout/lost_share": 0.25})
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


FAILURES, GAP = "rollout/lost_share", "sampling/sampling_logp_difference/max"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"step": 4, FAILURES: 0.25}, "logged steps: [1, 2, 3, 4]"),
        ({"step": 3, FAILURES: 0.0}, "step 3: 0.25 of the trajectories were lost, 0 is logged"),
        ({"step": 3, FAILURES: 0.25, GAP: 2.2}, "step 3: sampler and trainer differ by 2.2"),
    ],
)
def test_a_step_that_is_logged_otherwise_is_found(folder, line, expected):
    add_line(folder / "steps.jsonl", line)
    assert expected in problems_of(PLAN, folder)


def test_weights_that_are_not_finite_or_not_whole_are_found(folder):
    save_file({"weight": torch.tensor([0.0, float("nan")])}, folder / "final" / "model.safetensors")
    assert problems_of(PLAN, folder) == ["final/model.safetensors: 1 tensors are not finite"]
    (folder / "final" / "model.safetensors").write_bytes(b"torn")
    assert "final/model.safetensors cannot be read" in problems_of(PLAN, folder)[0]


# -------------------------------------------------------------------- what reached the loss, and was left open


def flip_a_bit(output, *args, original=multi_turn.add_masks, **kwargs):
    original(output, *args, **kwargs)
    output["tool_mask"][2, 3] ^= 1


def too_large(*args, original=estimators.compute_group_advantages, **kwargs):
    return 1.01 * original(*args, **kwargs)


def other_lambda(x, gae=estimators.ESTIMATORS["gae"].compute):
    return gae(replace(x, settings=replace(x.settings, lam=0.9)))


async def leave_open(self):
    pass


PLANTED = {
    "nothing": (PLAN, None, None),
    "nothing, with a critic": (PPO, None, None),
    "a flipped bit of the mask": (PLAN, (multi_turn, "add_masks", flip_a_bit), "the mask is wrong at [3]"),
    "a wrong advantage": (PLAN, (estimators, "compute_group_advantages", too_large), "the advantage is not"),
    "wrong returns": (PPO, None, "the returns are wrong"),
    "no whitening": (PPO, (credit, "whiten_by", lambda x, *args: x), "are not the whitened ones"),
    "open environments": (PLAN, (EnvSession, "close", leave_open), "12 environments were never closed, of q"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_is_found_in_what_a_whole_run_leaves_behind(bug, tmp_path, monkeypatch):
    plan, change, expected = PLANTED[bug]
    if bug == "wrong returns":  # rows of the table are frozen
        row = replace(estimators.ESTIMATORS["gae"], compute=other_lambda)
        monkeypatch.setitem(estimators.ESTIMATORS, "gae", row)
    elif change is not None:
        monkeypatch.setattr(*change)
    agent.train(plan, tmp_path, [], "").save_model(str(tmp_path / "final"))
    problems = problems_of(plan, tmp_path)
    assert any(expected in problem for problem in problems) if expected else problems == []


def test_weights_that_a_kill_has_changed_are_found(tmp_path, monkeypatch):
    def write(folder, **tensors):
        (folder / "run_0" / "final").mkdir(parents=True)
        save_file(tensors, folder / "run_0" / "final" / "model.safetensors")

    def roll_out_undisturbed(context, plan, base, servers):
        write(base, same=torch.ones(2), other=torch.zeros(2))
        return plan, [], 0.0, ""

    monkeypatch.setattr(soak, "_roll_out", roll_out_undisturbed)
    write(tmp_path, same=torch.ones(2), other=torch.full((2,), 1e-7), more=torch.ones(1))
    problems = soak._differs_from_undisturbed(None, replace(PLAN, faults=("SIGKILL",)), tmp_path, ([], ""))
    assert problems == [f"model.safetensors: {name} is not what it is without SIGKILL" for name in ("more", "other")]


# -------------------------------------------------------------------- the plans


def test_twenty_seeds_draw_every_sampler_and_two_hundred_every_fault():
    plans = [draw_plan(seed) for seed in range(200)]
    assert {plan.sampler for plan in plans[:20]} == {"scripted", "transformers", "server", "engine"}
    kinds = (faults.IN_THE_TASK, faults.IN_THE_NUMBERS, faults.ON_DISK, faults.SIGNALS, faults.ON_SERVERS)
    assert {fault for plan in plans for fault in plan.faults} == {fault for kind in kinds for fault in kind}
