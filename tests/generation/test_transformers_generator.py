"""The transformers back end against transformers' own generate and against plain forward passes."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, MistralConfig, Qwen2Config, Qwen3NextConfig, RwkvConfig

from agent_r1_trl.generation import GenerationError, GenerationRequest, Generator, SamplingParams
from agent_r1_trl.generation.local import generator as local
from agent_r1_trl.generation.local.decoding import ParkedRow, PrefixCache
from agent_r1_trl.generation.local.sampling import policy_logprobs
from tests.families.configurations import build
from tests.generation.helpers import GREEDY, PROMPTS, SAMPLED, VOCAB, forward_logprobs, make_generator, run, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


FAMILIES = {
    "qwen2": {"config_class": Qwen2Config},
    "llama": {"config_class": LlamaConfig},
    "sliding window": {"config_class": MistralConfig, "sliding_window": 8},
    "recurrent": {
        "config_class": Qwen3NextConfig,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 0,
    },
    "a state alone": {"config_class": MambaConfig},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers_generate_on_ragged_prompts(family):
    model = tiny_model(**FAMILIES[family]).eval()
    generations = run(make_generator(model), PROMPTS, params=GREEDY)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert generation.token_ids == expected[0, len(prompt) :].tolist()
        assert generation.logprobs == pytest.approx(forward_logprobs(model, prompt, generation, 1.0), abs=1e-5)


def test_a_model_whose_cache_cannot_be_passed_is_refused():
    with pytest.raises(ValueError, match=r"RwkvForCausalLM.* past_key_values.* Set use_vllm=True"):
        make_generator(tiny_model(config_class=RwkvConfig))


def test_rows_that_arrive_while_others_run_sample_the_same_ids(model):
    """Staggered arrivals, with longer prompts than the running rows: rows are moved, the buffers grow."""
    generator = make_generator(model)
    prompts = [[3 + index] * (1 + 37 * index) for index in range(6)]

    async def staggered():
        tasks = []
        for index, prompt in enumerate(prompts):
            tasks.append(
                asyncio.create_task(
                    generator.generate(
                        GenerationRequest(prompt_ids=prompt, max_tokens=150, seed=index, params=SAMPLED)
                    )
                )
            )
            await asyncio.sleep(0.02)
        return await asyncio.gather(*tasks)

    for index, generation in enumerate(asyncio.run(staggered())):
        [alone] = run(make_generator(model), [prompts[index]], max_tokens=150, seeds=[index])
        assert generation.token_ids == alone.token_ids


def test_the_seed_decides_the_ids(model):
    generator = make_generator(model)
    first, again, other = run(generator, [PROMPTS[0]] * 3, seeds=[11, 11, 12], max_tokens=20)
    assert first.token_ids == again.token_ids != other.token_ids
    [later] = run(generator, [PROMPTS[0]], seeds=[11], max_tokens=20)
    assert later.token_ids == first.token_ids


def test_sampled_frequencies_follow_the_distribution(model):
    generations = run(make_generator(model, max_batch_size=1000), [[5, 6, 7]] * 4000, max_tokens=1, seeds=range(4000))
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.8, dim=-1)
    counts = torch.bincount(torch.tensor([g.token_ids[0] for g in generations]), minlength=VOCAB)
    error = (counts / 4000 - probabilities).abs() / (probabilities * (1 - probabilities) / 4000).sqrt()
    assert error.max() < 4.5  # standard errors, 97 of them


def test_parked_rows_never_take_more_than_their_share_and_leave_it_when_they_are_taken():
    cache, draw = PrefixCache(max_bytes=100), random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        if draw.random() < 0.5:
            cache.put(ParkedRow(ids=ids, tensors=[torch.zeros(2, len(ids), 1, dtype=torch.uint8)] * 2))
        else:
            cache.take(ids)
        assert cache._num_bytes == sum(4 * len(row.ids) for row in cache._rows) <= 100
    cache.put(ParkedRow(ids=[1], tensors=[torch.zeros(101, dtype=torch.uint8)]))
    assert not cache._rows
    cache.clear()
    assert cache._num_bytes == 0


def test_a_sampled_stop_id_ends_the_turn_and_stays_in_it(model):
    [free] = run(make_generator(model), [PROMPTS[2]], params=GREEDY)
    stop_id = free.token_ids[4]
    first = free.token_ids.index(stop_id)
    for limit in (12, first + 1):  # also as the last token that is allowed
        [stopped] = run(make_generator(model, [stop_id]), [PROMPTS[2]], params=GREEDY, max_tokens=limit)
        assert (stopped.token_ids, stopped.stop) == (free.token_ids[: first + 1], "stop")


def test_max_tokens_cuts_each_row_at_its_own_limit(model):
    limits = [1, 7, 3, 30, 2, 9, 1, 4]
    generations = run(make_generator(model), PROMPTS, max_tokens=limits)
    assert [len(generation.token_ids) for generation in generations] == limits
    assert {generation.stop for generation in generations} == {"length"}


def test_an_interruption_means_what_is_in_flight_and_nothing_that_comes_later(model):
    generator = make_generator(model)
    [expected] = run(generator, PROMPTS[:1])
    assert generator._worker is not None and generator.is_idle, "its thread waits for more"
    assert generator.interrupt()
    [later] = run(generator, PROMPTS[:1])
    assert (later.token_ids, later.stop) == (expected.token_ids, "length")

    async def interrupted():
        request = GenerationRequest(prompt_ids=PROMPTS[0], max_tokens=10_000, seed=0, params=SAMPLED)
        answer = asyncio.ensure_future(generator.generate(request))
        while not generator._rows:
            await asyncio.sleep(0.001)
        generator.interrupt()
        return await answer

    part = asyncio.run(interrupted())
    assert part.stop == "interrupted" and part.token_ids[:12] == expected.token_ids[: len(part.token_ids)]
    [later] = run(generator, PROMPTS[:1])
    assert (later.token_ids, later.stop) == (expected.token_ids, "length")


def test_exactly_the_modules_that_trained_train_again_before_the_answer_arrives():
    model = tiny_model().train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    seen_during = []
    model.model.layers[0].register_forward_hook(lambda module, *_: seen_during.append(module.training))
    generator = make_generator(model)

    async def one():
        await generator.generate(GenerationRequest(prompt_ids=[1, 2], max_tokens=3, params=SAMPLED))
        return {name: module.training for name, module in model.named_modules()}

    assert asyncio.run(one()) == before
    assert seen_during == [False] * 3


def test_gradient_checkpointing_does_not_cost_the_cache():
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    widths = []
    model.model.layers[0].register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    [generation] = run(make_generator(model), [PROMPTS[2]], params=GREEDY, max_tokens=4)
    assert widths == [23, 1, 1, 1]  # one prefill, then one token at a time
    assert model.model.layers[0].gradient_checkpointing
    assert generation.logprobs == pytest.approx(forward_logprobs(model.eval(), PROMPTS[2], generation, 1.0), abs=1e-5)


def test_a_model_with_trls_fused_head_still_generates():
    from trl.trainer.utils import add_fused_lm_head

    plain, patched = tiny_model(), tiny_model()
    add_fused_lm_head(patched, temperature=0.8)
    assert [g.token_ids for g in run(make_generator(patched), PROMPTS)] == [
        g.token_ids for g in run(make_generator(plain), PROMPTS)
    ]


def test_new_weights_are_used_by_the_next_request(model):
    model = tiny_model()
    generator = make_generator(model)
    run(generator, [PROMPTS[0]])
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.5)
    [generation] = run(generator, [PROMPTS[0]])
    assert generation.logprobs == pytest.approx(forward_logprobs(model, PROMPTS[0], generation, 0.8), abs=1e-5)


def test_requests_with_other_settings_wait_for_their_own_batch(model):
    generator = make_generator(model)

    async def mixed():
        jobs = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)]
        return await asyncio.gather(
            *(generator.generate(GenerationRequest(prompt_ids=p, max_tokens=8, seed=3, params=s)) for p, s in jobs)
        )

    mixture = asyncio.run(mixed())
    greedy = run(generator, PROMPTS, max_tokens=8, params=GREEDY, seeds=[3] * 8)
    assert [g.token_ids for g in mixture[::2]] == [g.token_ids for g in greedy]


def test_filters_and_penalties_reach_the_sampler(model):
    params = SamplingParams(temperature=1.3, top_k=1)
    assert [g.token_ids for g in run(make_generator(model), PROMPTS, params=params)] == [
        g.token_ids for g in run(make_generator(model), PROMPTS, params=GREEDY)
    ]
    penalised = replace(GREEDY, repetition_penalty=1.7)
    for prompt, generation in zip(PROMPTS, run(make_generator(model), PROMPTS, params=penalised), strict=True):
        expected = model.eval().generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, repetition_penalty=1.7, eos_token_id=None
        )
        assert generation.token_ids == expected[0, len(prompt) :].tolist()


def test_the_batch_never_exceeds_its_limits(monkeypatch):
    model = tiny_model()
    expected = [g.token_ids for g in run(make_generator(model), PROMPTS, max_tokens=5)]
    monkeypatch.setattr(local, "MAX_PREFILL_TOKENS", 30)
    shapes = []
    model.model.layers[0].register_forward_hook(lambda _, args, __: shapes.append(args[0].shape[:2]))
    limited = run(make_generator(model, max_batch_size=3), PROMPTS, max_tokens=5)
    assert max(rows for rows, _ in shapes) <= 3
    assert max(rows * columns for rows, columns in shapes if columns > 1) <= 30
    assert [g.token_ids for g in limited] == expected


def test_a_failing_forward_fails_its_requests_with_the_cause_and_nothing_else(caplog):
    model = tiny_model()
    generator = make_generator(model)
    handle = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError("broken layer")))

    async def failing():
        return await asyncio.gather(
            *(
                generator.generate(GenerationRequest(prompt_ids=prompt, max_tokens=5, params=SAMPLED))
                for prompt in PROMPTS
            ),
            return_exceptions=True,
        )

    errors = [*asyncio.run(failing()), *asyncio.run(failing())]
    assert all(isinstance(error, GenerationError) for error in errors)
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in errors)
    assert "broken layer" in str(errors[0])
    assert [record.exc_info[1] for record in caplog.records] == [errors[0].__cause__], "its traceback, once"
    handle.remove()
    assert len(run(generator, [PROMPTS[0]])[0].token_ids) == 12


def test_a_diverged_model_is_an_error_not_a_token():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(GenerationError, match="NaN"):
        run(make_generator(model), [PROMPTS[0]])


@pytest.mark.parametrize(("when", "limit"), [("prefill", 3), ("decode", 3), ("decode", 0)])
def test_out_of_memory_halves_the_batch_and_changes_no_ids(when, limit):
    model = tiny_model()
    expected = [g.token_ids for g in run(make_generator(model), PROMPTS)]
    rows = []

    def limited_memory(module, args, kwargs):
        num_rows, columns = kwargs["input_ids"].shape
        if num_rows > limit and (columns > 1) == (when == "prefill"):
            raise torch.OutOfMemoryError("no room")
        rows.append(num_rows)

    model.register_forward_pre_hook(limited_memory, with_kwargs=True)
    if limit == 0:  # not even for one row
        with pytest.raises(GenerationError, match="no room"):
            run(make_generator(model), [PROMPTS[0]])
        return
    assert [g.token_ids for g in run(make_generator(model), PROMPTS)] == expected
    assert max(rows) >= 2


def test_a_short_request_does_not_wait_for_a_long_one(model):
    generator = make_generator(model)
    finished = []

    async def race():
        async def one(name, limit):
            await generator.generate(GenerationRequest(prompt_ids=[5, 6], max_tokens=limit, params=SAMPLED))
            finished.append(name)

        long = asyncio.create_task(one("long", 300))
        await asyncio.sleep(0.02)
        await one("short", 2)
        await long

    asyncio.run(race())
    assert finished == ["short", "long"]


def test_cancelling_frees_the_model_and_leaves_the_others_alone():
    model = tiny_model().train()
    generator = make_generator(model)

    async def cancelled():
        other = asyncio.create_task(
            generator.generate(GenerationRequest(prompt_ids=PROMPTS[1], max_tokens=40, seed=1, params=SAMPLED))
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(
                generator.generate(GenerationRequest(prompt_ids=[5], max_tokens=100_000, params=SAMPLED)),
                timeout=0.03,
            )
        result = await other
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(
                generator.generate(GenerationRequest(prompt_ids=[5], max_tokens=100_000, params=SAMPLED)),
                timeout=0.03,
            )
        return result, model.training

    result, is_training = asyncio.run(cancelled())
    assert is_training, "after a cancelled request returns, the model is the caller's again"
    assert result.token_ids == run(generator, [PROMPTS[1]], max_tokens=40, seeds=[1])[0].token_ids


def test_close_fails_what_is_running_and_refuses_more(model):
    generator = make_generator(model)

    async def closed():
        task = asyncio.create_task(
            generator.generate(GenerationRequest(prompt_ids=[5], max_tokens=100_000, params=SAMPLED))
        )
        await asyncio.sleep(0.02)
        await asyncio.to_thread(generator.close)
        with pytest.raises(GenerationError, match="closed"):
            await task
        with pytest.raises(GenerationError, match="closed"):
            await generator.generate(GenerationRequest(prompt_ids=[5], max_tokens=1, params=SAMPLED))

    asyncio.run(closed())
    assert generator._worker is None or not generator._worker.is_alive()


def test_an_idle_worker_thread_ends_by_itself(model, monkeypatch):
    monkeypatch.setattr("agent_r1_trl.generation.worker._IDLE_S", 0.01)
    generator = make_generator(model)
    before = threading.active_count()
    run(generator, [PROMPTS[0]])
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert len(run(generator, [PROMPTS[0]])[0].token_ids) == 12


def test_a_program_ends_although_a_step_hangs():
    program = """
import threading, time
from agent_r1_trl.generation import worker
class Hanging(worker.ThreadedGenerator):
    def _serve(self):
        time.sleep(1000)
worker._EXIT_S = 0.5
request = worker.GenerationRequest(prompt_ids=[5], max_tokens=1)
Hanging("hanging")._submit(worker.WorkerRequest(asked=request))
time.sleep(0.2)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


@pytest.mark.slow
def test_a_program_that_never_closes_its_generator_ends_at_once():
    """The main thread ends in the middle of an endless request."""
    program = """
import time
from agent_r1_trl.generation.worker import GenerationRequest, WorkerRequest
from tests.families.configurations import build
from tests.generation.helpers import SAMPLED, make_generator, tiny_model
request = GenerationRequest(prompt_ids=[5], max_tokens=10**9, params=SAMPLED)
make_generator(tiny_model())._submit(WorkerRequest(asked=request))
time.sleep(0.3)
print(time.time())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert time.time() - float(result.stdout.splitlines()[-1]) < 30, "the endless request was waited for"


def test_unusable_requests_are_refused(model):
    generator = make_generator(model)
    assert isinstance(generator, Generator)
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        run(generator, [[]])
    with pytest.raises(ValueError, match="max_tokens=0"):
        run(generator, [[1]], max_tokens=0)
    with pytest.raises(ValueError, match="max_batch_size=0"):
        make_generator(model, max_batch_size=0)


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=1.2, top_p=0.7, top_k=20, min_p=0.02)])
def test_the_logprobs_are_those_of_the_filtered_distribution(model, params):
    [generation] = run(make_generator(model), [PROMPTS[2]], params=params, max_tokens=25)
    ids = torch.tensor([PROMPTS[2] + generation.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPTS[2]) - 1 : -1]
    expected = policy_logprobs(logits, params).gather(1, ids[0, len(PROMPTS[2]) :, None]).squeeze(1)
    assert expected.isfinite().all()
    assert generation.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_model_that_cannot_be_sampled_from_is_named_with_what_helps():
    model = build("xlm", vocabulary=97, pad_token_id=0, eos_token_id=1)
    with pytest.raises(GenerationError, match=r"XLMWithLMHeadModel fails in the transformers generator.*Set use_vllm"):
        run(make_generator(model), [PROMPTS[0]])


def test_a_failure_after_a_decode_step_does_not_blame_the_architecture():
    model = tiny_model()
    generator = make_generator(model)
    run(generator, [PROMPTS[0]])
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError("broken layer")))
    with pytest.raises(GenerationError, match=r"broken layer$"):
        run(generator, [PROMPTS[0]])


def test_router_logits_in_the_configuration_change_nothing_that_is_sampled():
    ids = []
    for family in ("mixtral", "mixtral_router_logits"):
        model = build(family, vocabulary=97, pad_token_id=0, eos_token_id=1)
        ids.append([generation.token_ids for generation in run(make_generator(model), PROMPTS)])
    assert ids[0] == ids[1]
