"""The one-file GRPO learns the quickstart's task, and agrees with the package wherever the two can be compared."""

import functools
import importlib.util
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl import SearchQAEnv
from agent_r1_trl.advantages import compute_group_advantages
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation import SamplingParams, TransformersGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.tools import SearchIndex, make_search_tool

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CORPUS = RECIPES / "quickstart" / "data" / "corpus.jsonl"


def load_recipe():
    spec = importlib.util.spec_from_file_location("one_file_grpo", RECIPES / "one_file" / "grpo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipe = load_recipe()


@pytest.fixture(autouse=True, scope="module")
def one_thread(tmp_path_factory):
    """Matrices this small are faster on one core, and sums come out the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(AutoTokenizer.from_pretrained(RECIPES / "quickstart" / "model"))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(RECIPES / "quickstart" / "model", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def search(one_thread):
    return make_search_tool(SearchIndex(CORPUS), top_k=1)


class ScriptedModel:
    """Says its turns after each generation prompt, and where a trajectory only reads, wants to say something else."""

    def __init__(self, chat, scripts):
        self.scripts = [[chat.tokenizer(turn)["input_ids"] for turn in turns] for turns in scripts]
        self.opener = chat.tokenizer("<|im_start|>assistant\n")["input_ids"]
        self.vocab_size = len(chat.tokenizer)
        self.fed = [[] for _ in scripts]
        self.to_say = [[] for _ in scripts]

    def __call__(self, input_ids, past_key_values, use_cache):
        logits = torch.zeros(len(input_ids), 1, self.vocab_size)
        for row, (fed, turns) in enumerate(zip(self.fed, self.scripts, strict=True)):
            fed += input_ids[row].tolist()
            if fed[-len(self.opener) :] == self.opener:
                self.to_say[row] = list(turns.pop(0)) if turns else []
            logits[row, 0, self.to_say[row].pop(0) if self.to_say[row] else 1] = 5.0
        return types.SimpleNamespace(logits=logits, past_key_values=None)


CALL = '<tool_call>{"name": "search", "arguments": {"query": "capital Norway"}}</tool_call><|im_end|>'
BAD_CALL = '<tool_call>{"name": "search", "arguments": {"words": "Norway"}}</tool_call><|im_end|>'
ANSWER = "<answer> Oslo</answer><|im_end|>"
ENDLESS = "Norway " * 60


def test_the_mask_covers_exactly_the_sampled_tokens(chat, search):
    scripts = [[CALL, ANSWER], [ANSWER], [BAD_CALL, CALL, ANSWER], [CALL] * 9, [ENDLESS]]
    heard = ["".join(turns) for turns in (*scripts[:3], [CALL] * 5)]
    expected = [chat.tokenizer(text)["input_ids"] for text in heard] + [chat.tokenizer(ENDLESS)["input_ids"][:48]]
    question = {"question": "What is the capital of Norway?", "answers": ["Oslo"]}
    rolled_out = recipe.roll_out(ScriptedModel(chat, scripts), chat, search, [question] * len(scripts), temperature=0)
    for trajectory, sampled_ids in zip(rolled_out, expected, strict=True):
        assert [token for token, mask in zip(trajectory.ids, trajectory.mask, strict=True) if mask] == sampled_ids
        assert [logprob < 0 for logprob in trajectory.logprobs] == [mask == 1 for mask in trajectory.mask]
    assert [recipe.compute_reward(trajectory) for trajectory in rolled_out] == [1, 1, 1, 0, 0]
    assert [trajectory.num_turns for trajectory in rolled_out] == [2, 1, 3, 5, 0]
    masked = chat.tokenizer.decode(
        [i for i, mask in zip(rolled_out[0].ids, rolled_out[0].mask, strict=True) if not mask]
    )
    assert masked == (
        "<|im_start|>system\nTools: search(query)<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of Norway?<|im_end|>\n<|im_start|>assistant\n"
        "\n<|im_start|>user\n<tool_response>[1] Norway: The capital is Oslo.</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_it_samples_the_trajectories_that_the_package_samples(model, chat, search):
    questions = recipe.read_questions("test.jsonl")[:24]
    rolled_out = recipe.roll_out(model, chat, search, questions, temperature=0)
    limits = RolloutLimits(max_turns=5, max_tokens_per_turn=48, max_completion_length=900)
    generator = TransformersGenerator(
        model, pad_token_id=chat.tokenizer.pad_token_id, stop_token_ids=chat.stop_token_ids
    )
    env = functools.partial(SearchQAEnv, CORPUS, top_k=1, system_prompt="")
    runner = RolloutRunner(env, generator, chat, limits, SamplingParams(temperature=0))
    theirs = runner.run([RolloutRequest(example=question, example_id=question["id"]) for question in questions])
    runner.close()
    for own, other in zip(rolled_out, theirs, strict=True):
        assert own.ids == other.prompt_ids + other.completion_ids
        assert own.mask == [0] * len(other.prompt_ids) + other.action_mask
        assert own.num_turns == len(other.turns)
        assert recipe.compute_reward(own) == other.info["em"]
    assert (
        0 < sum(map(recipe.compute_reward, rolled_out)) < len(rolled_out)
        and max(own.num_turns for own in rolled_out) > 2
    )


def test_the_log_probabilities_of_sampling_are_those_of_one_pass_over_the_batch(model, chat, search):
    torch.manual_seed(0)
    rolled_out = recipe.roll_out(model, chat, search, recipe.read_questions("train.jsonl")[:6])
    ids, mask, sampled = recipe.make_batch(rolled_out)
    logprobs = recipe.compute_logprobs(model, ids)
    assert len({len(trajectory.ids) for trajectory in rolled_out}) > 1  # rows with padding are among them
    torch.testing.assert_close(logprobs * mask, sampled, atol=1e-4, rtol=0)


def test_advantages_are_those_of_the_package():
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1])
    advantages = recipe.compute_advantages(rewards, group_size=4)
    torch.testing.assert_close(
        advantages, compute_group_advantages(rewards, torch.tensor([7] * 4 + [2] * 4 + [9] * 4))
    )
    assert advantages[4:8].tolist() == [0] * 4
    assert advantages[11].item() == pytest.approx(0.75 / (0.5 + 1e-4))


def test_the_loss_is_the_clipped_objective_of_the_sampled_tokens():
    old = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -1.0, -3.0]])
    new = torch.tensor([[-1.0, -1.5, -9.0], [-1.5, -0.9, -3.3]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages = [2.0, -1.0]
    gains = []
    for row, column in mask.nonzero().tolist():
        ratio = math.exp(new[row, column].item() - old[row, column].item())
        gains.append(min(ratio * advantages[row], min(max(ratio, 0.8), 1.2) * advantages[row]))
    assert gains == pytest.approx([2.0, 2.4, -0.8, -math.exp(0.1), -0.8])
    loss = recipe.compute_loss(new, old, mask, torch.tensor(advantages))
    assert loss.item() == pytest.approx(-sum(gains) / 5)
    loss.backward()
    # Clipped (the second token gained enough, the first and third of the loser lost enough) or masked: no gradient.
    expected = [[-2.0 / 5, 0, 0], [0, math.exp(0.1) / 5, 0]]
    torch.testing.assert_close(new.grad, torch.tensor(expected))


@pytest.mark.release
def test_the_reward_rises():
    """Over 8 short steps the seeds 0, 1 and 2 gained 0.37, 0.51 and 0.31; without learning there is only noise."""
    options = ["--steps", "8", "--learning_rate", "1e-3", "--seed", "0"]
    history = recipe.train(recipe.read_options(options))
    assert sum(history[-3:]) / 3 > history[0] + 0.2
