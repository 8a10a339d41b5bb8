"""Real vLLM engines and contexts that are rewritten: sampler and trainer agree on every row."""

import pytest

from agent_r1_trl.environments import StepResult
from tests.effort import for_release
from tests.servers import on
from tests.trainers.test_vllm_training import check_two_steps, make_vllm_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("policy_server")]

POLICIES = {
    "window": {"context.policy": "window", "context.turns": 1},
    "drop_observations": {"context.policy": "drop_observations", "context.turns": 1, "context.tokens": 90},
    # The template forces empty reasoning, and shows none in earlier turns.
    "strip_thinking": {"context.policy": "strip_thinking", "chat_template_kwargs": {"enable_thinking": False}},
    "summarise": {"context.policy": "summarise", "context.turns": 2, "context.summary_tokens": 6},
}


class Talk:
    """Four turns, whatever is said."""

    def reset(self, example):
        self.num_turns = 0
        return example["prompt"]

    def step(self, message):
        self.num_turns += 1
        answer = {"role": "user", "content": f"Answer {self.num_turns}. It is worth no more than a note later on."}
        return StepResult([answer], float(len(message["content"]) % 3), self.num_turns == 4, {})

    def close(self):
        pass


def check(tmp_path, policy, **options):
    """Two steps of training, in which most trajectories have several rows."""
    limits = {
        "max_turns": 4,
        "max_tokens_per_turn": 6,
        "max_completion_length": 400,
    }
    trainer = make_vllm_trainer(tmp_path, env=Talk, **limits, **POLICIES[policy], **options)
    try:
        check_two_steps(trainer)
    finally:
        trainer.rollouts.close()
    assert all(entry["rollout/rows"] > 1.5 for entry in trainer.state.log_history if "rollout/rows" in entry)
    assert any("rollout/rows" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("policy", ["window", *for_release("drop_observations", "strip_thinking", "summarise")])
def test_a_server_and_the_trainer_agree(tmp_path, policy, policy_server):
    check(tmp_path, policy, **on(policy_server))


@pytest.mark.release
@pytest.mark.parametrize("policy", ["window", "strip_thinking", "summarise"])
def test_an_engine_in_process_and_the_trainer_agree(tmp_path, policy):
    check(tmp_path, policy)
