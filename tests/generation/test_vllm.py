"""A real vLLM engine on a tiny random model, against transformers."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from agent_r1_trl.generation import GenerationError, GenerationRequest, Generator, SamplingParams, VLLMGenerator
from tests.generation.helpers import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    check_greedy,
    check_masks,
    forward_logprobs,
    run,
    tiny_model,
)

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
STOP_ID = 13
EOS_ID = 14
# vLLM's attention on a CPU wants heads of at least 32.
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": EOS_ID}
PROBE = [20 + 7 * index % 60 for index in range(200)]  # more than one block of the engine's prefix cache


def random_policy(seed=0, **options):
    model = tiny_model(**(SIZES | options))
    return change(model, seed) if seed else model


def change(model, seed):
    """What an optimiser step does, only larger: every trainable weight moves."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gap(generator, model) -> float:
    """Largest difference between the engine's log-probabilities of fixed ids and the model's."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([PROBE])).logits[0, :-1], dim=-1)
    expected = logprobs.gather(1, torch.tensor(PROBE[1:]).unsqueeze(1)).squeeze(1)
    (scores,) = generator.scores(PROBE).values()
    return (torch.tensor(scores) - expected).abs().max().item()


def shared_draws():
    """The states of the generators that all threads share."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def engine():
    before, policy = dict(os.environ), random_policy(1)
    draws = shared_draws()
    generator = VLLMGenerator(policy, stop_token_ids=[STOP_ID], max_model_len=256, max_num_seqs=16)
    assert shared_draws() == draws, "the engine seeds what the trainer draws from"
    changed = {name for name in os.environ if os.environ[name] != before.get(name)}
    assert not {name for name in changed if not name.startswith("VLLM_")}, "the engine's variables leak"
    yield generator
    generator.close()
    assert not torch.distributed.is_initialized(), "the engine's process group outlives it"
    with pytest.raises(GenerationError, match="closed"):
        run(generator, [PROMPTS[0]])


@pytest.fixture
def policy(engine):
    """The model whose weights the engine has now."""
    model = random_policy().eval()
    engine.sync(model)
    return model


def test_greedy_ids_equal_those_of_transformers(engine, policy):
    assert isinstance(engine, Generator) and engine.max_model_length == 256
    check_greedy(engine, policy, STOP_ID)


def test_logprobs_are_those_of_the_sampler_under_the_temperature(engine, policy):
    for prompt, generation in zip(PROMPTS, run(engine, PROMPTS, max_tokens=20), strict=True):
        assert generation.logprobs == pytest.approx(forward_logprobs(policy, prompt, generation, 0.8), abs=1e-4)
    [single] = run(engine, [PROMPTS[0]], params=SamplingParams(top_k=1), max_tokens=8)
    assert single.logprobs == pytest.approx([0.0] * len(single.logprobs), abs=1e-6)
    with pytest.raises(GenerationError, match="256"):
        run(engine, [[3] * 300])


def test_a_sync_brings_the_new_weights_and_forgets_what_the_old_ones_computed(engine, policy):
    run(engine, PROMPTS)
    run(engine, [PROBE])
    change(policy, seed=2)
    assert gap(engine, policy) > 0.1, "the engine must still have the old weights here"
    engine.sync(policy)
    assert gap(engine, policy) < 1e-4
    [generation] = run(engine, [PROBE])
    assert generation.logprobs == pytest.approx(forward_logprobs(policy, PROBE, generation, 0.8), abs=1e-4)


def test_a_prefix_cache_that_a_foreign_request_holds_is_dropped_all_the_same(engine, policy):
    """A request that somebody else has put into the engine keeps blocks of the cache, and vLLM then says no."""
    run(engine, [PROBE])
    from vllm import SamplingParams as EngineParams

    inner = engine._engine
    inner.add_request("foreign", {"prompt_token_ids": PROMPTS[2]}, EngineParams(max_tokens=100, ignore_eos=True))
    inner.step()
    assert inner.reset_prefix_cache() is False
    change(policy, seed=6)
    engine.sync(policy)
    [generation] = run(engine, [PROBE], max_tokens=4)
    assert generation.logprobs == pytest.approx(forward_logprobs(policy, PROBE, generation, 0.8), abs=1e-4)
    inner.abort_request(["foreign"])


def test_weights_that_the_policy_cannot_give_do_not_blame_the_engine(engine):
    def broken():
        yield "model.norm.weight", torch.ones(64)
        raise ValueError("layer 3 is quantised")

    with pytest.raises(ValueError, match=r"^layer 3 is quantised$"):
        engine.update_weights(broken())


def test_an_adapter_that_parts_tied_embeddings_is_refused_before_an_engine_starts():
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = get_peft_model(random_policy(tie_word_embeddings=True), config)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        VLLMGenerator(model, stop_token_ids=[STOP_ID])


def test_an_adapter_is_synced_without_touching_the_live_weights(engine, policy):
    model = get_peft_model(policy, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])).eval()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    for seed in (3, 4):
        change(model, seed)
        assert gap(engine, model) > 0.1
        engine.sync(model)
        assert gap(engine, model) < 1e-4
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_weights_of_another_shape_are_refused_by_name(engine, policy):
    with pytest.raises(ValueError, match=r"model\.norm\.weight \(65,\)"):
        engine.update_weights([("model.norm.weight", torch.ones(65))])
    with pytest.raises(ValueError, match=r"model\.layers\.7\."):
        engine.update_weights([("model.layers.7.mlp.down_proj.weight", torch.ones(64, 48))])
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        engine.update_weights([("model.norm.weight", torch.ones(64))], is_complete=True)


def test_more_prompt_tokens_than_fit_one_step_are_sampled_with_their_seeds(engine, policy):
    prompts = [[20 + (7 * index + place) % 60 for place in range(200)] for index in range(48)]
    together = run(engine, prompts, max_tokens=3)
    assert [item.token_ids for item in together[-4:]] == [
        run(engine, [prompts[index]], max_tokens=3, seeds=[index])[0].token_ids for index in range(44, 48)
    ]


def test_the_seed_decides_the_ids(engine, policy):
    together = run(engine, [PROMPTS[2]] * 3, seeds=[11, 11, 2**62 + 1], max_tokens=20)
    [alone] = run(engine, [PROMPTS[2]], seeds=[11], max_tokens=20)
    assert together[0].token_ids == together[1].token_ids == alone.token_ids != together[2].token_ids


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(top_p=0.9), SamplingParams(top_k=5)], ids=str)
def test_sampling_draws_nothing_that_the_trainers_thread_could_miss(engine, policy, params):
    draws = shared_draws()
    run(engine, PROMPTS, params=params)
    assert shared_draws() == draws


def test_only_the_given_stop_ids_end_a_turn_and_stay_in_it(engine):
    def always(token_id):
        """A model that says one word only."""
        model = random_policy()
        with torch.no_grad():
            model.model.norm.weight.zero_()
            model.model.norm.weight[0] = 1.0
            model.lm_head.weight.zero_()
            model.model.embed_tokens.weight[:, 0] = 50.0  # the residual stream's first entry is large and positive
            model.lm_head.weight[token_id, 0] = 50.0
        return model

    engine.sync(always(STOP_ID))
    [stopped] = run(engine, [PROMPTS[0]], params=GREEDY, max_tokens=5)
    assert (stopped.token_ids, stopped.stop) == ([STOP_ID], "stop")
    engine.sync(always(EOS_ID))
    [ongoing] = run(engine, [PROMPTS[0]], params=GREEDY, max_tokens=5)
    assert (ongoing.token_ids, ongoing.stop) == ([EOS_ID] * 5, "length")


def test_a_cancelled_request_leaves_the_engine(engine, policy):
    async def cancelled():
        other = asyncio.create_task(
            engine.generate(GenerationRequest(prompt_ids=PROMPTS[1], max_tokens=9, seed=1, params=SAMPLED))
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(
                engine.generate(GenerationRequest(prompt_ids=[5], max_tokens=250, params=GREEDY)), timeout=0.05
            )
        return await other

    generation = asyncio.run(cancelled())
    assert engine._engine.get_num_unfinished_requests() == 0
    assert generation.token_ids == run(engine, [PROMPTS[1]], seeds=[1], max_tokens=9)[0].token_ids


def test_a_failing_step_fails_its_requests_with_the_cause_and_nothing_else(engine, policy, monkeypatch, caplog):
    def broken():
        raise ZeroDivisionError("broken kernel")

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", broken)
        with pytest.raises(GenerationError, match="broken kernel") as caught:
            run(engine, PROMPTS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.__cause__ in [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert len(run(engine, [PROMPTS[0]], params=GREEDY, max_tokens=3)[0].token_ids) <= 3
    assert engine._engine.get_num_unfinished_requests() == 0


def test_a_step_that_hangs_fails_its_requests_and_the_next_sync(engine, policy, monkeypatch):
    release, real = threading.Event(), engine._engine.step

    def hanging():
        release.wait(20)
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", hanging)
        patch.setattr(engine, "_step_timeout_s", 0.5)
        start = time.monotonic()
        for _ in range(2):  # the second request does not wait
            with pytest.raises(GenerationError, match=r"hangs.*servers.request_timeout=0.5"):
                run(engine, [PROMPTS[0]])
        with pytest.raises(GenerationError, match="hangs"):
            engine.sync(policy)
        assert time.monotonic() - start < 5
        release.set()
    assert len(run(engine, [PROMPTS[0]], params=GREEDY, max_tokens=3)[0].token_ids) <= 3, "it was only slow"


def test_cancelling_does_not_wait_for_a_step_that_hangs(engine, policy, monkeypatch):
    release, real = threading.Event(), engine._engine.step

    async def cut():
        request = engine.generate(GenerationRequest(prompt_ids=PROMPTS[0], max_tokens=5, params=SAMPLED))
        await asyncio.wait_for(request, 0.2)

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", lambda: release.wait(20) and real())
        patch.setattr(engine, "_step_timeout_s", 0.5)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(cut())
        assert time.monotonic() - start < 5
        release.set()
    assert len(run(engine, [PROMPTS[0]], params=GREEDY, max_tokens=3)[0].token_ids) <= 3


TWO_RANKS = """
import torch
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
from tests.generation.test_vllm import *

model = random_policy(rank + 1).eval()
generator = VLLMGenerator(model, stop_token_ids=[STOP_ID], max_model_len=256, max_num_seqs=8)
change(model, 5 + rank)
assert gap(generator, model) > 0.1
generator.sync(model)
assert gap(generator, model) < 1e-4
answers = run(generator, PROMPTS[: 2 + 3 * rank], params=GREEDY)
generator.close()
counts = [None, None]
torch.distributed.all_gather_object(counts, len(answers))  # the trainer's group has outlived the engine
print("counts", counts)
"""


@pytest.mark.release
def test_each_rank_has_an_engine_of_its_own_inside_the_trainers_process_group(tmp_path):
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(
        [*command, str(tmp_path / "two_ranks.py")], capture_output=True, text=True, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("[2, 5]") == 2


def test_what_a_token_was_drawn_from_is_told(engine, policy):
    check_masks(engine, policy, SamplingParams(temperature=0.8, top_k=12))
    check_masks(engine, policy, SamplingParams(temperature=0.8, top_k=12, top_p=0.8, min_p=0.1))
