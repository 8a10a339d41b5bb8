"""Evaluation: metrics by hand, intervals against formulas and a naive loop, models and adapters from disk."""

import json
import math
import random

import numpy as np
import pytest

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.evaluation import (
    EvaluationResult,
    bootstrap_intervals,
    difference,
    evaluate,
    evaluate_model,
    load_agent,
)
from agent_r1_trl.evaluation.result import example_sums, to_json, trajectory_sums
from agent_r1_trl.generation import SamplingParams, ScriptedGenerator
from agent_r1_trl.rollout import NothingRolledOutError, RolloutLimits
from agent_r1_trl.testing import AddEnv, make_policy, make_tokenizer
from agent_r1_trl.trajectory import StopReason, ToolCall, ToolErrorKind, ToolResult, Trajectory, Turn


def rolled_out(*, turns=1, results=(), reward=0.0, reason=StopReason.DONE, **info) -> Trajectory:
    """A trajectory without tokens: metrics read turns, results, reward, stop reason and info."""
    calls = [ToolResult(call=ToolCall(name="f", arguments={}), content="", error=error) for error in results]
    items = [Turn(start=0, end=0, message={"role": "assistant"}) for _ in range(turns)]
    if items:
        items[0].tool_results = calls
    names = ("prompt_messages", "prompt_ids", "completion_ids", "action_mask", "logprobs", "turn_ids", "authors")
    values = {name: [] for name in names}
    return Trajectory(**values, turns=items, stop_reason=reason, outcome_reward=reward, info=info)


def result_of(values, name="exact_match", **settings) -> EvaluationResult:
    rows = [{name: (float(value), 1.0)} for value in values]
    return EvaluationResult.from_rows(rows, example_ids=[str(i) for i in range(len(rows))], **settings)


# ---------------------------------------------------------------- metrics


def test_metrics_of_three_trajectories_by_hand():
    trajectories = [
        rolled_out(turns=3, results=[None, ToolErrorKind.TIMEOUT], reward=1.0, em=1.0, f1=1.0, valid_answer=1.0),
        rolled_out(turns=1, reward=-1.0, em=0.0, f1=0.5, valid_answer=0.0, reason=StopReason.MAX_TURNS),
        rolled_out(turns=2, results=[None, None], reward=-1.0, em=0.0, f1=0.0, valid_answer=1.0, score=7, solved=True),
    ]
    rows = [example_sums([item]) for item in trajectories]
    metrics = EvaluationResult.from_rows(rows, example_ids=["a", "b", "c"]).metrics
    expected = {
        "exact_match": 1 / 3,
        "f1": 0.5,
        "valid_answer_rate": 2 / 3,
        "score": 7.0,
        "solved": 1.0,
        "reward": -1 / 3,
        "turns": 2.0,
        "tool_calls": 4 / 3,
        "call_error_rate": 1 / 4,
        "truncated_rate": 1 / 3,
        "completion_tokens": 0.0,
        "input_tokens": 0.0,
        "sampled_tokens": 0.0,
        "lost_rate": 0.0,
    }
    assert metrics == pytest.approx(expected)


def test_what_is_no_finite_number_in_info_is_no_metric():
    sums = trajectory_sums(
        rolled_out(em=1.0, prediction="Oslo", gold=["Oslo"], nan=math.nan, none=None, huge=-(10**400))
    )
    assert "exact_match" in sums and not {"prediction", "gold", "nan", "none", "huge"} & set(sums)


def test_an_info_key_cannot_hide_a_metric():
    sums = trajectory_sums(rolled_out(turns=2, reward=0.0, **{"tool_calls": 99}))
    assert sums["tool_calls"] == (0.0, 1.0) and sums["info_tool_calls"] == (99.0, 1.0)


def test_a_failed_trajectory_counts_as_a_failure_and_nowhere_else():
    failed = rolled_out(turns=0, reason=StopReason.ENVIRONMENT_ERROR)
    rows = [example_sums([rolled_out(em=1.0)]), example_sums([failed])]
    metrics = EvaluationResult.from_rows(rows, example_ids=["a", "b"]).metrics
    assert metrics["exact_match"] == 1.0 and metrics["turns"] == 1.0
    assert metrics["lost_rate"] == 0.5


def test_a_trajectory_that_nothing_scored_counts_everywhere_but_in_the_reward():
    unscored = rolled_out(reward=0.0)
    unscored.is_scored = False
    rows = [example_sums([rolled_out(reward=4.0)]), example_sums([unscored])]
    result = EvaluationResult.from_rows(rows, example_ids=["a", "b"])
    assert result.metrics["reward"] == 4.0
    assert [row["turns"][1] for row in rows] == [1.0, 1.0]


def test_without_a_tool_call_there_is_no_error_rate():
    result = EvaluationResult.from_rows([example_sums([rolled_out()])], example_ids=["a"])
    assert math.isnan(result.metrics["call_error_rate"])
    assert json.loads(to_json(result.to_dict()))["call_error_rate"] is None


# ---------------------------------------------------------------- intervals


def test_intervals_agree_with_a_naive_bootstrap_of_a_ratio():
    rng = random.Random(0)
    pairs = [(float(rng.randint(0, calls)), float(calls)) for calls in (rng.randint(0, 5) for _ in range(60))]
    naive = []
    for _ in range(4000):
        drawn = rng.choices(pairs, k=60)
        naive.append(sum(n for n, _ in drawn) / sum(d for _, d in drawn))
    low, high = bootstrap_intervals({"call_error_rate": np.array(pairs)})["call_error_rate"]
    assert (low, high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])), abs=0.02)


def test_attempts_at_one_example_are_no_independent_evidence():
    """Four attempts that always agree say no more than one."""
    values = [1] * 40 + [0] * 60
    once = result_of(values).intervals["exact_match"]
    rows = [{"exact_match": (4.0 * value, 4.0)} for value in values]
    four = EvaluationResult.from_rows(rows, example_ids=[""] * 100).intervals["exact_match"]
    assert four == pytest.approx(once, abs=0.01)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    # The ends solve (p - share)^2 = 1.96^2 p (1 - p) / n.
    [([1] * 10, 0.7225, 1.0), ([0] * 10, 0.0, 0.2775), ([1], 0.2065, 1.0), ([1] * 3 + [0] * 7, 0.1078, 0.6032)],
)
def test_a_share_of_examples_has_an_interval_also_where_all_are_alike(values, low, high):
    found = result_of(values).intervals["exact_match"]
    assert found == pytest.approx((low, high), abs=1e-4)
    share, n = sum(values) / len(values), len(values)
    for end in found:
        assert (end - share) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / n, abs=1e-6)


def test_counts_and_values_between_0_and_1_keep_the_bootstrap():
    assert result_of([1] * 10, name="turns").intervals["turns"] == (1.0, 1.0)
    sums = [(1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (1.0, 1.0)]
    rows = [{"f1": pair} for pair in sums]
    found = EvaluationResult.from_rows(rows, example_ids=["", "", "", ""]).intervals["f1"]
    assert found == bootstrap_intervals({"f1": np.array(sums)})["f1"]
    unscored = [{"exact_match": (1.0, 1.0)}] * 9 + [{"exact_match": (0.0, 0.0)}]
    ends = EvaluationResult.from_rows(unscored, example_ids=[""] * 10).intervals["exact_match"]
    assert ends == pytest.approx((0.7009, 1.0), abs=1e-4), "nine of nine: an example without a value is none"


def test_a_difference_between_other_examples_is_refused():
    other = EvaluationResult.from_rows([{"f1": (1.0, 1.0)}], example_ids=["x"])
    with pytest.raises(ValueError, match="examples"):
        difference(result_of([1], name="f1"), other)


def test_the_dictionary_is_flat_and_json():
    record = result_of([1, 0], settings={"seed": 0}, num_generations=2).to_dict()
    assert record["exact_match"] == 0.5 and record["num_examples"] == 2 and record["num_generations"] == 2
    assert record["intervals"]["exact_match"] == pytest.approx([0.0945, 0.9055], abs=1e-4)
    assert "trajectories" not in record and "rows" not in record


# ---------------------------------------------------------------- rollouts


class Adder(AddEnv):
    """Right if the answer is the example's."""

    def outcome_reward(self, trajectory):
        is_right = trajectory.final_text.strip() == self.example["answer"]
        trajectory.info["em"] = float(is_right)
        return float(is_right)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("qwen3")


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatFormat(tokenizer)


ROWS = [{"id": f"q{i}", "prompt": f"1 + {i}?", "answer": "3"} for i in range(4)]


def scripted(tokenizer, chat) -> ScriptedGenerator:
    def ids(text):
        return tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)

    call = ids('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>')
    return ScriptedGenerator([call, ids("3")], stop_token_ids=chat.stop_token_ids)


def test_every_example_is_rolled_out_greedily_as_often_as_asked(tokenizer, chat):
    seen = []
    generator = scripted(tokenizer, chat)
    result = evaluate(generator, Adder, chat, ROWS, num_generations=2, seed=5, on_trajectory=seen.append)
    assert [(t.example_id, t.generation) for t in result.trajectories] == [
        (f"q{i}", generation) for i in range(4) for generation in range(2)
    ]
    assert len(seen) == 8 and result.num_examples == 4 and result.example_ids == ["q0", "q1", "q2", "q3"]
    assert {request.params for request in generator.requests} == {SamplingParams(temperature=0.0)}
    assert len({t.seed for t in result.trajectories}) == 8
    assert result.metrics["exact_match"] == 1.0 and result.metrics["turns"] == 2.0
    assert result.metrics["tool_calls"] == 1.0 and result.metrics["call_error_rate"] == 0.0
    assert result.settings["temperature"] == 0.0 and result.settings["limits"]["max_turns"] == 8


def test_nothing_to_evaluate_is_an_error(tokenizer, chat):
    with pytest.raises(ValueError, match="examples"):
        evaluate(scripted(tokenizer, chat), Adder, chat, [])
    with pytest.raises(ValueError, match="num_generations=0"):
        evaluate(scripted(tokenizer, chat), Adder, chat, ROWS, num_generations=0)


def test_when_every_environment_fails_each_cause_is_said_with_its_count(tokenizer, chat):
    class Broken(Adder):
        def reset(self, example):
            raise OSError("lost" if example["id"] == "q2" else "the server is down")

    with pytest.raises(
        NothingRolledOutError, match=r"All 4 trajectories were lost: 3 x .*is down \(.*'q0'\); 1 x .*lost"
    ):
        evaluate(scripted(tokenizer, chat), Broken, chat, ROWS)


# ---------------------------------------------------------------- models on disk


@pytest.fixture(scope="module")
def model_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


LIMITS = RolloutLimits(max_turns=2, max_tokens_per_turn=5, max_completion_length=2000)


def test_a_saved_model_is_evaluated_within_its_context(model_folder):
    result = evaluate_model(model_folder, Adder, ROWS[:2], limits=LIMITS)
    assert result.num_examples == 2 and result.settings["model"] == str(model_folder)
    assert result.settings["limits"]["max_model_length"] == 1024
    assert all(0 < t.num_action_tokens <= 10 for t in result.trajectories)


def test_an_adapter_directory_samples_from_the_adapter(model_folder, tokenizer, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    base, _ = load_agent(str(model_folder))
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=1.0)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids).logits
    loaded, loaded_tokenizer = load_agent(str(tmp_path))  # the tokenizer is the base model's
    assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
    assert not torch.allclose(load_agent(str(model_folder))[0](ids).logits, expected, atol=1e-2)
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    adapted = evaluate_model(tmp_path, Adder, ROWS[:1], limits=LIMITS)
    merged = evaluate_model(loaded.merge_and_unload(), Adder, ROWS[:1], tokenizer=tokenizer, limits=LIMITS)
    plain = evaluate_model(model_folder, Adder, ROWS[:1], limits=LIMITS)
    assert adapted.trajectories[0].completion_ids == merged.trajectories[0].completion_ids
    assert adapted.trajectories[0].completion_ids != plain.trajectories[0].completion_ids


def test_a_directory_without_a_model_names_the_checkpoint_inside(tmp_path):
    for name in ("checkpoint-20", "checkpoint-8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="checkpoint-20"):
        load_agent(str(tmp_path))
    with pytest.raises(ValueError, match="nowhere"):
        load_agent(str(tmp_path / "nowhere"))


def test_a_loaded_model_needs_its_tokenizer(model_folder):
    with pytest.raises(ValueError, match="tokenizer=None"):
        evaluate_model(load_agent(str(model_folder))[0], Adder, ROWS)
