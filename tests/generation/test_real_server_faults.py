"""A real vLLM server that is killed and started again in the middle of a rollout."""

import signal
import threading

import pytest

from agent_r1_trl.environments import StepResult
from agent_r1_trl.generation.vllm.server_routes import HTTPClient, UnfitServerError, rpc
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trajectory import StopReason
from tests.servers import RealServer
from tests.trainers.helpers import make_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.release]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """With other weights than the trainer's."""
    folder = tmp_path_factory.mktemp("server")
    tokenizer = make_tokenizer("qwen3")
    make_policy(tokenizer, seed=3, hidden_size=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    server = RealServer(folder / "model", folder)
    try:
        server.wait()
        yield server
    finally:
        server.end()


def test_a_server_without_the_worker_extension_is_told_from_one_in_trouble(server):
    http = HTTPClient()
    try:
        with pytest.raises(UnfitServerError, match="--worker-extension-cls"):
            http.run(rpc(http, server.url, "agent_r1_nothing", timeout_s=30))
    finally:
        http.close()


class Outage:
    """Kills the server in the second rollout, when every trajectory waits in its first tool call."""

    def __init__(self, server, num_trajectories):
        self.server = server
        self.waiting = threading.Barrier(num_trajectories, action=self.strike)
        self.num_rollouts = 0

    def strike(self):
        self.num_rollouts += 1
        if self.num_rollouts == 2:
            self.server.signal(signal.SIGKILL)
            self.server.start()


class Talk:
    """Two turns, whatever is said; longer texts earn more."""

    outage = None

    def reset(self, example):
        self.num_turns = 0
        return example["prompt"]

    def step(self, message):
        self.num_turns += 1
        if self.num_turns == 1:
            self.outage.waiting.wait(120)
        reward = len(message["content"]) % 3
        return StepResult([{"role": "user", "content": "go on"}], reward, self.num_turns == 2, {})

    def close(self):
        pass


@pytest.mark.timeout(900)
def test_a_server_killed_in_a_rollout_and_started_again_puts_nothing_wrong_into_the_batch(tmp_path, server):
    env = type("Talk", (Talk,), {"outage": Outage(server, 4)})
    trainer = make_trainer(
        tmp_path, script=None, env=env, model=make_policy(make_tokenizer("qwen3"), hidden_size=64), use_vllm=True,
        vllm_mode="server", servers={"urls": [server.url], "retry_window": 600},
        vllm_max_model_length=512, max_completion_length=64, max_tokens_per_turn=8, max_steps=3, learning_rate=0.02,
        per_device_train_batch_size=4, num_generations=4,
    )  # fmt: skip
    stops = []
    real = trainer.rollouts.generate

    def rolled_out(*args, **kwargs):
        batch = real(*args, **kwargs)
        stops.append([item.stop_reason for item in batch.trajectories])
        return batch

    trainer.rollouts.generate = rolled_out
    trainer.train()
    trainer.rollouts.close()
    assert stops == [[StopReason.DONE] * 4] * 3
    steps = [entry for entry in trainer.state.log_history if "sampling/sampling_logp_difference/max" in entry]
    assert [entry["sampling/servers_lost"] for entry in steps] == [0, 0, 1], (
        "the loss in the second, said by the third"
    )
    for entry in steps:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-4
        assert entry["sampling/sync_logprob_gap"] < 1e-4
