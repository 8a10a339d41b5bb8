"""Training with real vLLM engines: after every sync the sampler has the trainer's weights."""

import math

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.critic.attach import critic_parameters
from agent_r1_trl.environments import StepResult
from agent_r1_trl.generation import VLLMGenerator, VLLMServerGenerator
from agent_r1_trl.generation.sync import SyncError
from agent_r1_trl.generation.vllm import server as server_module
from agent_r1_trl.generation.vllm.build import ADAPTER_FOLDER
from agent_r1_trl.generation.vllm.settings import ServerSettings
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.testing import AddEnv, make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trajectory import StopReason
from tests.servers import Line, on, serve_policy
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.versions import SAMPLED, Weights, gaps_to_named_weights

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("policy_server")]

RELEASE = pytest.mark.release
LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def make_vllm_trainer(tmp_path, **options):
    # vLLM's attention on a CPU wants heads of at least 32.
    policy = make_policy(make_tokenizer("qwen3"), hidden_size=64)
    defaults = {
        "env": AddEnv, "use_vllm": True, "vllm_max_model_length": 512, "max_completion_length": 24, "max_steps": 2,
        "learning_rate": 0.02, "temperature": 0.9,
    }  # fmt: skip
    return make_trainer(tmp_path, script=None, model=policy, **(defaults | options))


def check_two_steps(trainer):
    """Train; both steps change the weights, and the second rollout is made with those of the first step."""
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    moved = max((value - before[name]).abs().max() for name, value in trainer.model.state_dict().items())
    assert moved > 1e-3, "nothing was learned, so nothing had to be synced"
    steps = [entry for entry in trainer.state.log_history if "sampling/importance_sampling_ratio/mean" in entry]
    assert len(steps) == 2
    for entry in steps:
        assert entry["sampling/sync_logprob_gap"] < 1e-4
        assert entry["sampling/sampling_logp_difference/max"] < 1e-4
        for kind in ("min", "mean", "max"):
            assert entry[f"sampling/importance_sampling_ratio/{kind}"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("peft_config", [None, pytest.param(LORA, marks=RELEASE)], ids=["full", "lora"])
def test_grpo_trains_with_vllm_in_process(tmp_path, peft_config):
    trainer = make_vllm_trainer(tmp_path, peft_config=peft_config)
    try:
        check_two_steps(trainer)
        assert isinstance(trainer.rollouts.runner.generator, VLLMGenerator)
    finally:
        trainer.rollouts.close()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))


MASKS = [{"top_k": 12, "top_p": 0.8, "min_p": 0.1}, {"top_k": 12}]


@RELEASE
@pytest.mark.parametrize("filters", MASKS, ids=["all filters", "top_k"])
def test_ratios_are_one_under_a_sampling_mask(tmp_path, filters):
    """The engine says what each token was drawn from, and the trainer's log-probs are those of it."""
    trainer = make_vllm_trainer(tmp_path, update_layout="shared", **filters)
    try:
        check_two_steps(trainer)
        assert all(turn.kept_ids for item in trainer.last_trajectories for turn in item.turns)
    finally:
        trainer.rollouts.close()


@RELEASE
def test_a_sampler_left_behind_stops_the_run(tmp_path, monkeypatch):
    trainer = make_vllm_trainer(tmp_path)
    monkeypatch.setattr(VLLMGenerator, "update_weights", only_at_the_start(VLLMGenerator.update_weights))
    try:
        with pytest.raises(SyncError, match="stale weights"):
            trainer.train()
        assert trainer.state.global_step == 1, "the first rollout was fine"
    finally:
        trainer.rollouts.close()


def only_at_the_start(update):
    """The first two calls (the engine's start, the first rollout) pass."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) <= 2:
            update(*args, **kwargs)

    return counted


@pytest.fixture
def server(policy_server):
    """Has other weights than the trainers' full fine-tuning starts from."""
    return policy_server


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory):
    """A server of adapters, with the base weights of the trainers."""
    options = ("--enable-lora", "--max-lora-rank", "8")
    settings = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serve_policy(tmp_path_factory.mktemp("server"), 0, *options, environment=settings) as url:
        yield url


@pytest.mark.parametrize("peft_config", [None, pytest.param(LORA, marks=RELEASE)], ids=["full", "merged lora"])
def test_grpo_trains_with_a_server(tmp_path, server, peft_config):
    trainer = make_vllm_trainer(tmp_path, peft_config=peft_config, **on(server))
    check_two_steps(trainer)
    trainer.rollouts.close()


def test_ratios_are_one_under_the_sampling_mask_of_a_server(tmp_path, server):
    trainer = make_vllm_trainer(tmp_path, **MASKS[0], **on(server))
    check_two_steps(trainer)
    trainer.rollouts.close()


@RELEASE
def test_grpo_trains_with_a_server_that_gets_the_adapter_alone(tmp_path, lora_server, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("whole weights were sent")

    monkeypatch.setattr(VLLMServerGenerator, "_send", refuse)
    trainer = make_vllm_trainer(tmp_path, peft_config=LORA, **on(lora_server))
    check_two_steps(trainer)
    assert [folder.name.split("-")[-1] for folder in (tmp_path / ADAPTER_FOLDER).iterdir()] == ["2"]
    trainer.rollouts.close()


# -------------------------------------------------------------------- PPO


PPO = {"trainer": MultiTurnPPOTrainer, "num_generations": 1}


def spy_on(monkeypatch, owner, method):
    """The names of the weights of every sync that goes through `owner.method`, whose first argument they are."""
    real, syncs = getattr(owner, method), []

    def spied(self, weights, *args, **kwargs):
        names = []
        syncs.append(names)
        noted = ((names.append(name), (name, value))[1] for name, value in weights)
        return real(self, noted, *args, **kwargs)

    monkeypatch.setattr(owner, method, spied)
    return syncs


def check_no_critic(syncs, trainer):
    """Each sync had weights of the policy as a plain checkpoint names them, and no others."""
    plain = set(make_policy(make_tokenizer("qwen3"), hidden_size=64).state_dict())
    assert critic_parameters(trainer.model)
    assert len(syncs) >= 2
    for names in syncs:
        assert names
        assert set(names) <= plain


@RELEASE
def test_ppo_trains_with_vllm_in_process_and_a_critic_in_an_adapter(tmp_path, monkeypatch):
    syncs = spy_on(monkeypatch, VLLMGenerator, "update_weights")
    trainer = make_vllm_trainer(tmp_path, peft_config=LORA, critic="adapter", **PPO)
    try:
        check_two_steps(trainer)
    finally:
        trainer.rollouts.close()
    check_no_critic(syncs, trainer)


@RELEASE
def test_ppo_trains_with_a_server_and_a_critic_of_its_own(tmp_path, server, monkeypatch):
    syncs = spy_on(monkeypatch, VLLMServerGenerator, "_send")
    trainer = make_vllm_trainer(tmp_path, critic="model", **PPO, **on(server))
    check_two_steps(trainer)
    trainer.rollouts.close()
    check_no_critic(syncs, trainer)


@RELEASE
def test_ppo_sends_the_policys_adapter_without_the_critics(tmp_path, lora_server, monkeypatch):
    written = []
    real = server_module.write_adapter
    monkeypatch.setattr(
        server_module,
        "write_adapter",
        lambda model, adapter, tensors, folder: (written.append(tensors), real(model, adapter, tensors, folder)),
    )
    trainer = make_vllm_trainer(tmp_path, peft_config=LORA, critic="adapter", **PPO, **on(lora_server))
    check_two_steps(trainer)
    trainer.rollouts.close()
    assert len(written) == 2
    present = {name.replace(".default.", ".") for name, _ in trainer.model.named_parameters() if ".default." in name}
    for tensors in written:
        assert set(tensors) == present


# -------------------------------------------------------------------- ahead of the update


WITHOUT_GUARD = {"failures.min_effective_share": 0.0}
"""The learning rate is far too large for running ahead, so that weights differ."""


@RELEASE
def test_a_rollout_ahead_is_one_step_old_and_its_ratio_says_so(tmp_path):
    trainer = make_vllm_trainer(tmp_path, rollouts_ahead=1, **WITHOUT_GUARD)
    try:
        trainer.train()
    finally:
        trainer.rollouts.close()
    first, second = (entry for entry in trainer.state.log_history if "sampling/staleness" in entry)
    assert first["sampling/staleness_max"] == 0 and 0 < second["sampling/staleness"] <= 1
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
    ratio = second["sampling/importance_sampling_ratio/mean"]
    assert math.isfinite(ratio)
    assert abs(ratio - 1.0) > 1e-3
    assert second["sampling/sync_logprob_gap"] < 1e-4, "the third rollout would have had the second step's weights"


KINDS = ["in process", "in process, cut", "server", "server, cut", "server of adapters", "server of adapters, cut"]


@RELEASE
@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_ahead_comes_from_the_weights_that_it_names(tmp_path, kind, request):
    options = {"rollouts_ahead": 2, "cut_turns": kind.endswith("cut"), "max_tokens_per_turn": 24}
    if kind.startswith("server"):
        options |= on(request.getfixturevalue("lora_server" if "adapters" in kind else "server"))
    options |= {"peft_config": LORA} if "adapters" in kind else {}
    kept = Weights()
    options = {**SAMPLED, **WITHOUT_GUARD, "max_steps": 4, "max_completion_length": 240, **options}
    del options["script"]
    trainer = kept.trainer = make_vllm_trainer(tmp_path, callbacks=[kept], **options)
    try:
        trainer.train()
    finally:
        trainer.rollouts.close()
    logged = [entry for entry in trainer.state.log_history if "sampling/versions" in entry]
    assert len(logged) == 4 and max(entry["sampling/versions"] for entry in logged) > 1
    found = list(gaps_to_named_weights(kept, temperature=0.9))
    assert max(gap for _, gap, _ in found) < 1e-5
    assert max(other for version, _, other in found if version) > 1e-3


# -------------------------------------------------------------------- several servers, some of which die


class Talk:
    """Three turns, whatever is said."""

    def reset(self, example):
        self.num_turns = 0
        return example["prompt"]

    def step(self, message):
        self.num_turns += 1
        return StepResult([{"role": "user", "content": "go on"}], 0.0, self.num_turns == 3, {})

    def close(self):
        pass


def talk(lines, **limits):
    """The trajectories of six conversations with the servers at the end of these lines."""
    chat = ChatFormat(make_tokenizer("qwen3"))
    generator = VLLMServerGenerator(
        [line.url for line in lines],
        stop_token_ids=chat.stop_token_ids,
        settings=ServerSettings(retry_window=3, request_timeout=30),
    )
    runner = RolloutRunner(Talk, generator, chat, RolloutLimits(max_tokens_per_turn=8, **limits))
    requests = [
        RolloutRequest(example=row, example_id=row["id"], generation=0, seed=index, reset_seed=index)
        for index, row in enumerate(questions(6))
    ]
    try:
        return runner.run(requests)
    finally:
        runner.close()
        generator.close()


def served(line, trajectory):
    """How many of the trajectory's turns came over this line."""
    prompt = trajectory.prompt_ids
    return sum(answered[: len(prompt)] == prompt for answered in line.answered)


def test_trajectories_stay_with_a_server_and_are_spread_over_all(server):
    with Line(server) as left, Line(server) as right:
        trajectories = talk([left, right])
    counts = [(served(left, item), served(right, item)) for item in trajectories]
    assert sorted(counts) == [(0, 3)] * 3 + [(3, 0)] * 3


def test_trajectories_of_a_server_that_dies_move_to_the_other(server):
    with Line(server, num_answers=4) as dying, Line(server) as other:
        trajectories = talk([dying, other])
    assert [item.stop_reason for item in trajectories] == [StopReason.DONE] * 6
    counts = [(served(dying, item), served(other, item)) for item in trajectories]
    assert {sum(pair) for pair in counts} == {3}
    assert any(min(pair) > 0 for pair in counts), "some moved between two of their turns"


def test_without_another_server_the_rest_end_as_infrastructure_failures(server):
    with Line(server, num_answers=7) as dying:
        trajectories = talk([dying], max_concurrency=1)
    assert [item.stop_reason for item in trajectories] == [StopReason.DONE] * 2 + [StopReason.GENERATION_ERROR] * 4
    assert [len(item.turns) for item in trajectories] == [3, 3, 1, 0, 0, 0]
    assert all(dying.url in item.error for item in trajectories[2:])
