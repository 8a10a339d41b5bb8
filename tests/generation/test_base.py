"""What a generator of the user's own needs, and what the trainer does with what it has."""

import asyncio

import pytest

from agent_r1_trl.generation import Generation, GenerationRequest, Generator, ScriptedGenerator
from agent_r1_trl.generation.base import GenerationError, as_generator, check_generation
from agent_r1_trl.generation.sync import SyncError, policy_scores, sync_weights
from tests.generation.helpers import tiny_model


class OnlyGenerates:
    async def generate(self, request):
        num = request.max_tokens
        return Generation(token_ids=[request.seed] * num, logprobs=[-1.0] * num, stop="length")


class TakesWeights(OnlyGenerates):
    """Has `sync`, which returns nothing, and cannot score."""

    model = None

    def sync(self, model):
        self.model = model


class Scores(TakesWeights):
    def __init__(self, offset=0.0):
        self.offset = offset

    def scores(self, token_ids):
        return {"mine": [score + self.offset for score in policy_scores(self.model, token_ids)]}


def tokenizer(text, **options):
    return {"input_ids": [3, 14, 15, 92]}


def test_generate_is_all_that_is_needed():
    generator = as_generator(OnlyGenerates())
    assert isinstance(generator, Generator)
    answer = asyncio.run(generator.generate(GenerationRequest(prompt_ids=[1], max_tokens=2, seed=7)))
    assert answer.token_ids == [7, 7]
    assert not generator.can_score and generator.scores([1, 2]) is None
    assert (generator.sync(None), generator.sleep(), generator.close()) == (False, False, None)
    assert sync_weights(generator, tiny_model(), tokenizer) == {}


def test_a_sampler_that_takes_weights_is_timed_and_one_that_scores_is_compared():
    given, model = TakesWeights(), tiny_model()
    assert sync_weights(as_generator(given), model, tokenizer).keys() == {"time/sync_s"}
    assert given.model is model
    assert sync_weights(as_generator(Scores()), model, tokenizer)["sampling/sync_logprob_gap"] == 0.0
    with pytest.raises(SyncError, match="mine"):
        sync_weights(as_generator(Scores(offset=0.1)), model, tokenizer)


def test_what_a_sampler_says_of_itself_is_logged_after_a_sync():
    given = TakesWeights()
    given.metrics = lambda: {"sampling/engines": 2.0}
    assert sync_weights(as_generator(given), tiny_model(), tokenizer)["sampling/engines"] == 2.0


def test_a_generator_is_taken_as_it_is():
    generator = ScriptedGenerator([[1]])
    assert as_generator(generator) is generator


@pytest.mark.parametrize(
    "given", [object(), OnlyGenerates, lambda prompt_ids: prompt_ids], ids=["object", "class", "function"]
)
def test_what_cannot_generate_is_refused(given):
    with pytest.raises(ValueError, match=r"generator=.*generate"):
        as_generator(given)


class OtherArguments:
    async def generate(self, request, more):
        return None


class TakesFields:
    async def generate(self, prompt_ids, *, max_tokens, seed, params):
        return None


class TakesAny:
    async def generate(self, prompt_ids, **options):
        return None


def test_a_generate_with_other_arguments_is_refused():
    with pytest.raises(
        ValueError, match=r"its generate takes \(request, more\): .*Name an object with async generate"
    ):
        as_generator(OtherArguments())


@pytest.mark.parametrize("kind", [TakesFields, TakesAny])
def test_a_generate_that_takes_the_fields_of_a_request_one_by_one_is_told_what_to_read(kind):
    with pytest.raises(ValueError, match=r"generator=.*one by one.*generate\(self, request\).*request\.max_tokens"):
        as_generator(kind())


def test_an_answer_of_another_form_is_named():
    with pytest.raises(GenerationError, match="generate returned None; it must be a Generation"):
        check_generation(None, 9)
