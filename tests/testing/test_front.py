"""The front page of `agent_r1_trl.testing`: what it costs and what it holds."""

import subprocess
import sys

import torch

from agent_r1_trl import testing
from agent_r1_trl.testing import FAMILIES, judge_server, local_server, make_policy, make_tokenizer, verdict


def test_importing_it_loads_no_test_runner_and_nothing_heavy_and_the_package_does_not_load_it():
    source = (
        "import sys, agent_r1_trl\n"
        "assert 'agent_r1_trl.testing' not in sys.modules\n"
        "from agent_r1_trl.testing import roll_out, say, check_env, judge_server, AddEnv\n"
        "print(*sorted({'pytest', 'torch', 'transformers', 'trl', 'openai', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, ""), ended.stderr


def test_every_name_that_it_lists_is_there():
    assert all(getattr(testing, name) is not None for name in testing.__all__)
    assert set(testing._MODULE_OF) <= set(testing.__all__)


def test_a_policy_depends_on_its_seed_alone_and_has_the_size_that_is_stated():
    tokenizer = make_tokenizer("qwen3")
    one, same, other = (make_policy(tokenizer, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert 50_000 < sum(parameter.numel() for parameter in one.parameters()) < 70_000


def test_a_tokenizer_is_a_fresh_object_each_time():
    for family in FAMILIES:
        first = make_tokenizer(family)
        first.chat_template = ""
        assert make_tokenizer(family).chat_template


def test_a_server_of_a_test_hangs_up_fails_and_remembers():
    import httpx

    answers = [None, (503, "busy", ("Retry-After", "1")), (200, {"x": 1})]
    with local_server(lambda body, number: answers[number - 1]) as (url, seen):
        try:
            httpx.post(url, json={"n": 1}, headers={"x-key": "k"})
            raise AssertionError("the first connection is hung up")
        except httpx.RemoteProtocolError:
            pass
        busy, fine = httpx.post(url, json={"n": 2}), httpx.post(url, json={"n": 3})
    assert (busy.status_code, busy.text, busy.headers["retry-after"]) == (503, "busy", "1") and fine.json() == {"x": 1}
    assert seen.bodies == [{"n": 1}, {"n": 2}, {"n": 3}] and seen.headers[0]["X-Key"] == "k"


def test_a_judge_refuses_what_is_no_request_of_a_judge_and_says_what_is_asked_first():
    import httpx

    with judge_server(faults=[(500, "down"), verdict(3, "x")]) as (url, _):
        bodies = [httpx.post(url, json={"messages": [{"role": "user", "content": "hi"}]}) for _ in range(3)]
    assert [item.status_code for item in bodies] == [500, 200, 400]
    assert bodies[1].json()["choices"][0]["message"]["content"] == '{"reason": "because", "scores": [3, "x"]}'
