"""Gradient checkpointing and any number of processes leave the gradients of policy and critic as they are."""

import pytest
import torch

from agent_r1_trl.critic import attach as critic_adapter
from agent_r1_trl.critic.attach import is_critic_name
from tests.distributed.critics import KINDS, cases_of, one_step
from tests.distributed.launch import LAUNCHES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


def largest_gap(step, other):
    assert step["gradients"].keys() == other["gradients"].keys()
    return max((gradient - other["gradients"][name]).abs().max() for name, gradient in step["gradients"].items())


@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
def test_checkpointing_leaves_gradients_alone(results, launch):
    steps = results(launch)["critics"]
    for kind, checkpointing in cases_of(launch):
        step, plain = steps[kind, checkpointing], steps[kind, "off"]
        assert largest_gap(step, plain) <= 1e-6, (kind, checkpointing)
        if checkpointing != "off":
            assert step["block_runs"] > plain["block_runs"], "nothing was recomputed"


@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_processes_give_the_gradients_of_one(results, launch):
    one, two = results("one")["critics"], results(launch)["critics"]
    for case in cases_of(launch):
        assert largest_gap(two[case], one[case]) <= 1e-6, case


@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
def test_packed_micro_batches_by_tokens_give_the_gradients_of_padded_rows(results, launch):
    packed, padded = results(launch)["packed"], results("one")["critics"]
    for kind in KINDS:
        assert largest_gap(packed[kind], padded[kind, "off"]) <= 1e-5, kind
        assert packed[kind]["block_runs"] > 2, "several micro-batches, or the recomputation"


@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
@pytest.mark.parametrize("kind", KINDS)
def test_policy_and_critic_both_learn(results, launch, kind):
    gradients = results(launch)["critics"][kind, "off"]["gradients"]
    for is_critic in (True, False):
        largest = [grad.abs().max() for name, grad in gradients.items() if is_critic_name(name) is is_critic]
        assert largest, is_critic
        assert min(largest) > 1e-5, is_critic


def test_the_comparison_sees_a_critic_recomputed_under_the_policys_adapter(results, policy_folder, monkeypatch):
    monkeypatch.setattr(critic_adapter, "_with_adapter_of_forward", lambda checkpoint, base: checkpoint)
    plain = results("one")["critics"]["adapter", "off"]
    assert largest_gap(one_step("adapter", "non-reentrant", policy_folder), plain) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_loss_is_part_of_what_is_compared(results, policy_folder, monkeypatch, kind):
    from agent_r1_trl.trainers import ppo

    monkeypatch.setattr(ppo, "value_loss", lambda values, *args, **options: (0 * values.sum(), torch.zeros(())))
    silenced, plain = one_step(kind, "off", policy_folder), results("one")["critics"][kind, "off"]
    assert largest_gap(silenced, plain) > 1e-3
    for name, gradient in silenced["gradients"].items():
        assert not is_critic_name(name) or torch.count_nonzero(gradient) == 0, name
