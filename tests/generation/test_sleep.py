"""`vllm_enable_sleep_mode`: the engine gives its memory to the update, and has new weights before it works again.

vLLM's engines sleep on GPUs only, so here one is imitated, with the states of vLLM's; its methods are vLLM's. It also
stands for one that holds less than its model.
Not covered: how much memory that frees.
"""

import copy
import inspect
import time
import types

import pytest
import torch

from agent_r1_trl.generation import GenerationError
from agent_r1_trl.generation.vllm.generator import VLLMGenerator
from agent_r1_trl.rollout import RolloutRunner
from agent_r1_trl.testing import AddEchoEnv, chat_of, make_policy, make_tokenizer
from tests.generation.helpers import GREEDY, run, tiny_model
from tests.toys import limits_of
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.versions import SAMPLED, LateChat, Weights


class Engine:
    """Which parts are awake, and what was done in which state. Weights that slept are gone."""

    def __init__(self, enable_sleep_mode=True):
        self.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(enable_sleep_mode=enable_sleep_mode, max_model_len=512),
            scheduler_config=types.SimpleNamespace(policy="fcfs"),
        )
        self.awake = {"weights", "kv_cache"}
        self.model = tiny_model()
        self.requests, self.log = [], []
        self.is_cache_held = False

    def sleep(self, level=1, mode="abort"):
        assert level == 2, "level 1 would keep the weights in host memory, and they are sent anew anyway"
        self.awake.clear()
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))
        self.log.append("sleep")

    def wake_up(self, tags=None):
        self.awake |= set(tags)
        self.log.append(f"wake {' '.join(tags)}")

    def is_sleeping(self):
        return self.awake != {"weights", "kv_cache"}

    def apply_model(self, func):
        assert "weights" in self.awake, "weights were loaded into memory that is given away"
        self.model.load_weights = self.load
        func(self.model)
        self.log.append("load")

    def load(self, weights):
        own, names = dict(self.model.named_parameters()), set()
        for name, weight in weights:
            own[name].copy_(weight)
            names.add(name)
        return names

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        if self.is_cache_held and reset_running_requests:
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")
        return not self.is_cache_held

    def add_request(self, name, prompt, params):
        self.requests.append(name)

    def abort_request(self, names, **options):
        self.requests = [name for name in self.requests if name not in names]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        assert not self.is_sleeping(), "a sleeping engine was asked for tokens"
        assert all(parameter.isfinite().all() for parameter in self.model.parameters())
        self.log.append("step")
        entry = [{5: types.SimpleNamespace(logprob=-1.0)}]
        output = types.SimpleNamespace(token_ids=[5], logprobs=entry, finish_reason="stop")
        return [
            types.SimpleNamespace(request_id=self.requests.pop(0), finished=True, outputs=[output])
            for _ in list(self.requests)
        ]


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(VLLMGenerator, "_engine_params", lambda self, request: None)
    return Engine()


def test_the_engine_sleeps_in_the_update_and_wakes_with_new_weights_in_memory_that_was_freed(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.log.append("free"))
    generator, model = VLLMGenerator(engine, stop_token_ids=[5]), tiny_model().requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    for _ in range(2):
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        generator.sync(model)
        assert run(generator, [[3, 4]], params=GREEDY)[0].token_ids == [5]
        assert all(map(torch.equal, engine.model.parameters(), model.parameters())), "all weights, frozen ones too"
        generator.sleep()
    generator.close()
    again = ["free", "wake weights", "load", "free", "wake kv_cache", "step", "sleep"]
    assert engine.log == ["load", "step", "sleep", *again]


def test_a_prefix_cache_that_cannot_be_dropped_stops_the_sync(engine):
    """Its keys and values come from older weights; a turn that goes on from it would be sampled off-policy."""
    generator, model = VLLMGenerator(engine, stop_token_ids=[5]), tiny_model()
    engine.is_cache_held = True
    with pytest.raises(GenerationError, match=r"keeps its prefix cache.*older weights"):
        generator.sync(model)
    engine.is_cache_held = False
    assert generator.sync(model)
    generator.close()


@pytest.mark.parametrize("length_of_model", [None, 131072])
def test_a_rollout_ends_where_the_engine_ends_which_may_hold_less_than_the_model(engine, length_of_model):
    """vLLM takes a model with longrope for one of its original length, unless it is told otherwise."""
    generator = VLLMGenerator(engine, stop_token_ids=[5])
    runner = RolloutRunner(AddEchoEnv, generator, chat_of(), limits_of(max_model_length=length_of_model))
    assert runner.limits.max_model_length == 512


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_engine_has_these_methods():
    from vllm import EngineArgs, LLMEngine

    for name in ("sleep", "wake_up", "is_sleeping", "apply_model", "reset_prefix_cache"):
        ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (Engine, LLMEngine))
        assert [*ours] == [*theirs], name
    assert "enable_sleep_mode" in inspect.signature(EngineArgs).parameters


class Unprobed(VLLMGenerator):
    """The imitation has no log-probs of prompts."""

    can_score = False


class LateTools(LateChat):
    """Some first answers of a rollout that is ahead come in the middle of an update."""

    is_update = False

    def is_late(self):
        return super().is_late() and not LateTools.is_update


class AsleepInUpdates(Weights):
    """Looks at engine and gate in every update."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.seen = engine, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        gate, num_steps = self.trainer.rollouts.generator, self.engine.log.count("step")
        LateTools.is_update = True
        deadline = time.monotonic() + 20
        while len(self.trainer.rollouts.ahead) == 2 and not gate._line:
            assert time.monotonic() < deadline, "turns wait at the gate for the end of the update"
            time.sleep(0.01)
        self.seen.append((self.engine.is_sleeping(), gate._is_open, len(gate._inside)))
        assert self.engine.log.count("step") == num_steps
        LateTools.is_update = False


@pytest.mark.parametrize("cut", [False, True])
def test_nothing_begins_in_an_engine_that_sleeps_while_rollouts_are_ahead_of_the_update(engine, tmp_path, cut):
    """A step of the engine while it sleeps would fail, and so would weights that are loaded beside a turn."""
    policy, is_open = make_policy(make_tokenizer("qwen3")), []
    engine.model = copy.deepcopy(policy)
    generator, kept = Unprobed(engine, stop_token_ids=[5], keeps_parts=cut), AsleepInUpdates(engine)
    sleep, load = engine.sleep, engine.load
    engine.sleep = lambda **options: (is_open.append(kept.trainer.rollouts.generator._is_open), sleep(**options))
    engine.load = lambda weights: (is_open.append(kept.trainer.rollouts.generator._is_open), load(weights))[1]
    options = {"use_vllm": True, "vllm_enable_sleep_mode": True, "rollouts_ahead": 2, "cut_turns": cut, "max_steps": 5}
    options |= {"servers.max_logprob_gap": 1e9, "failures.min_effective_share": 0.0, "model": policy}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": questions(2), "num_generations_eval": 4}
    kept.trainer = make_trainer(
        tmp_path, callbacks=[kept], wrap_generator=lambda _: generator, **{**SAMPLED, **options, "env": LateTools}
    )
    kept.trainer.train()
    generator.close()
    assert kept.seen == [(True, False, 0)] * 5
    assert is_open and not any(is_open), "the gate is shut before the engine sleeps and while it gets weights"
    order = [entry for entry in engine.log if entry not in ("step", "wake kv_cache")]
    wakes = ["wake weights", "load", "sleep"]
    num_evaluations = sum("eval_reward" in entry for entry in kept.trainer.state.log_history)
    assert num_evaluations >= 2 and order == ["load", "sleep", *wakes * (4 + num_evaluations)]
    for batch in kept.batches:
        assert [item.stop_reason.value for item in batch] == ["done"] * 8
        assert all(len(item.turns) == 3 for item in batch)
    assert len({item.seed for batch in kept.batches for item in batch}) == 5 * 8, "none twice"
    versions = [entry["sampling/versions"] for entry in kept.trainer.state.log_history if "sampling/versions" in entry]
    assert max(versions) > 1, "they go on behind the sleep"
