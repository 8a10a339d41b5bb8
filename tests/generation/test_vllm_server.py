"""A real vLLM server with a tiny random model, against transformers."""

import pytest

from agent_r1_trl.generation import Generator, SamplingParams, VLLMServerGenerator
from agent_r1_trl.generation.base import RefusedRequestError, RequestTooLongError
from tests.generation.helpers import PROMPTS, check_greedy, check_masks, run
from tests.generation.test_vllm import STOP_ID, random_policy
from tests.servers import vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.release]

PROBE = [20 + 7 * index % 60 for index in range(200)]  # more than one block of the prefix cache


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    random_policy(1).save_pretrained(folder / "model")
    with vllm_server(folder / "model", folder, "--skip-tokenizer-init") as address:
        yield address


@pytest.fixture(scope="module")
def engine(url):
    generator = VLLMServerGenerator([url], stop_token_ids=[STOP_ID])
    yield generator
    generator.close()


@pytest.fixture
def policy(engine):
    """The model whose weights the server has now."""
    model = random_policy().eval()
    engine.sync(model)
    return model


def test_the_server_tells_its_context_and_says_that_a_request_is_too_long(engine):
    assert engine.max_model_length == 512
    with pytest.raises(RequestTooLongError, match="maximum context length is 512 tokens"):
        run(engine, [PROBE * 3], max_tokens=1)
    with pytest.raises(RequestTooLongError, match="maximum context length is 512 tokens"):
        run(engine, [PROBE], max_tokens=500)
    with pytest.raises(RefusedRequestError, match="min_p") as refused:
        run(engine, [PROBE], params=SamplingParams(min_p=7.0))
    assert not isinstance(refused.value, RequestTooLongError)


def test_greedy_ids_equal_those_of_transformers(engine, policy):
    assert isinstance(engine, Generator)
    check_greedy(engine, policy, STOP_ID)


def test_what_a_token_was_drawn_from_is_told(engine, policy):
    check_masks(engine, policy, SamplingParams(temperature=0.8, top_k=12))
    check_masks(engine, policy, SamplingParams(temperature=0.8, top_k=12, top_p=0.8, min_p=0.1))
    with pytest.raises(RefusedRequestError, match="Start the server with --max-logprobs 48"):
        run(engine, PROMPTS[:1], params=SamplingParams(top_k=40), max_tokens=2)
