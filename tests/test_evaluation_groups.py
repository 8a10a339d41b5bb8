"""pass@k and pass^k, tags, costs and paired comparisons, against sums by hand and other ways to the same number."""

import itertools

import pytest

from agent_r1_trl.environments.data_files import tags_of
from agent_r1_trl.evaluation import EvaluationResult
from agent_r1_trl.evaluation.comparison import compare, read_examples, write_examples
from agent_r1_trl.evaluation.result import attempts_of, example_sums, pass_all_k, pass_at_k, token_counts
from agent_r1_trl.evaluation.table import split_by
from agent_r1_trl.trajectory import Author, Segment, StopReason, Trajectory, Turn
from tests.test_evaluation import result_of, rolled_out


@pytest.mark.parametrize("num_solved", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_k_is_the_share_of_draws_with_a_solved_attempt_or_of_solved_ones_alone(num_solved, k):
    attempts = [True] * num_solved + [False] * (5 - num_solved)
    draws = list(itertools.combinations(attempts, k))
    assert pass_at_k(5, num_solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_all_k(5, num_solved, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_all_of_two_attempts_are_solved_at_half_a_question_and_one_of_five_sixths():
    solved = [[1, 1, 1, 0], [1, 1, 0, 0]]  # C(3, 2) / C(4, 2) = 1/2 and 1/6; a solved one: 1 and 5/6
    rows = [example_sums([rolled_out(em=float(one)) for one in group]) for group in solved]
    result = EvaluationResult.from_rows(rows, example_ids=["a", "b"], num_generations=4)
    assert result.metrics["pass^2"] == pytest.approx((1 / 2 + 1 / 6) / 2)
    assert result.intervals["pass^2"] == pytest.approx((1 / 6, 1 / 2))
    assert result.metrics["pass@2"] == pytest.approx((1 + 5 / 6) / 2)
    assert result.metrics["pass^4"] == 0.0 and result.metrics["pass^1"] == result.metrics["pass@1"] == 0.625
    assert "pass^2" in compare(result, result)


def test_groups_are_counted_over_what_was_rolled_out():
    group = [
        rolled_out(em=1.0),
        rolled_out(em=0.0),
        rolled_out(success=True),
        rolled_out(reason=StopReason.ENVIRONMENT_ERROR),
    ]
    sums = example_sums(group)
    assert sums["pass@1"] == (pytest.approx(2 / 3), 1.0) and sums["pass@2"] == (1.0, 1.0) and "pass@4" not in sums
    assert sums["solved_always"] == sums["solved_never"] == (0.0, 1.0)
    assert "pass@1" not in example_sums([rolled_out(em=1.0)]) and attempts_of(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(("success", "is_solved"), [(-1.0, 0.0), (0.0, 0.0), (1 / 3, 0.0), (0.5, 1.0), (True, 1.0)])
def test_a_share_of_success_is_solved_from_one_half_on(success, is_solved):
    assert example_sums([rolled_out(success=success)] * 2)["solved_always"] == (is_solved, 1.0)


def test_without_a_score_an_outcome_above_zero_is_solved():
    sums = example_sums([rolled_out(reward=1.0), rolled_out(reward=0.5)])
    assert sums["solved_always"] == (1.0, 1.0)
    assert example_sums([rolled_out(reward=-1.0), rolled_out(reward=0.0)])["solved_never"] == (1.0, 1.0)


def test_a_tag_has_the_figures_of_its_own_examples():
    result = result_of([1, 0, 1, 1])
    rows = [{"meta": {"level": level}} for level in (1, 2, 1, 2)]
    parts = split_by(result, rows, "meta.level")
    assert {tag: part.metrics["exact_match"] for tag, part in parts.items()} == {"1": 1.0, "2": 0.5}
    assert parts["2"].example_ids == ["1", "3"] and parts["1"].num_examples == 2
    assert tags_of([{"a.b": 3}, {"a": {"b": 4}}, {}], "a.b") == ["3", "4", "(none)"]
    with pytest.raises(ValueError, match=r"by='meta.kind': .*the first one has meta"):
        split_by(result, rows, "meta.kind")


def tokens(text: str, turns: list[tuple[int, int]], prompt: int, segments=()) -> Trajectory:
    """`a` is sampled, `o` is not."""
    turn_ids = [next((i for i, (start, end) in enumerate(turns) if start <= n < end), -1) for n in range(len(text))]
    return Trajectory(
        prompt_messages=[],
        prompt_ids=[7] * prompt,
        completion_ids=[1] * len(text),
        action_mask=[int(letter == "a") for letter in text],
        logprobs=[0.0] * len(text),
        turn_ids=turn_ids,
        authors=[Author.POLICY if letter == "a" else Author.ENVIRONMENT for letter in text],
        turns=[Turn(start=start, end=end, message={"role": "assistant"}) for start, end in turns],
        stop_reason=StopReason.DONE,
        segments=list(segments),
    )


def test_a_server_reads_the_whole_context_of_each_turn():
    counts = token_counts(tokens("aaooaa", [(0, 2), (4, 6)], prompt=10))
    assert counts == {"completion_tokens": 6, "input_tokens": 10 + 14, "sampled_tokens": 4}
    rewritten = tokens("aaaa", [(0, 2), (2, 4)], 10, [Segment(start=2, row=1, prompt_ids=[7] * 3)])
    assert token_counts(rewritten)["input_tokens"] == 10 + 3


# ---------------------------------------------------------------- comparisons


def test_a_comparison_has_difference_interval_and_counts():
    change = compare(result_of([0, 0, 1, 1] * 25), result_of([1, 0, 1, 1] * 25))["exact_match"]
    assert (change.before, change.after) == (0.5, 0.75)
    assert 0.16 < change.low < 0.25 < change.high < 0.34
    assert change.counts == (25, 0, 75)


def test_an_example_that_failed_in_one_of_two_evaluations_is_compared_in_neither():
    one, two = result_of([1, 1, 0, 0]), result_of([1, 1, 0, 0])
    two.rows[3] = {"lost_rate": (1.0, 1.0)}
    change = compare(one, two)["exact_match"]
    assert change.counts == (0, 0, 3) and change.before == change.after == pytest.approx(2 / 3)
    assert (change.low, change.high) == (0.0, 0.0)


def panel_of(ids="ab", seeds=(7, 8), attempts=1):
    rows = [{"f1": (1.0, 1.0)}] * len(ids)
    return EvaluationResult.from_rows(rows, example_ids=[*ids], reset_seeds=[*seeds], num_generations=attempts)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (panel_of("ba"), "row 1 is 'a' in the first and 'b' in the second"),
        (panel_of("abc", (7, 8, 9)), "row 3 is missing in the first and 'c' in the second"),
        (panel_of(seeds=(7, 9)), "the seed of 'b' is 8 in the first and 9 in the second"),
        (panel_of(attempts=4), r"attempts at each: 4\) in the second; .* the attempts are not"),
    ],
)
def test_results_of_different_panels_are_not_compared(other, difference):
    assert compare(panel_of(), panel_of())["f1"].counts == (0, 0, 2)
    with pytest.raises(ValueError, match=f"{panel_of().panel} .*{other.panel} .*{difference}"):
        compare(panel_of(), other)


def test_examples_survive_the_file(tmp_path):
    groups = [
        [rolled_out(em=1.0, f1=1.0), rolled_out(em=0.0, f1=0.5)],
        [rolled_out(em=0.0, f1=0.0), rolled_out(em=0.0, f1=0.1)],
    ]
    result = EvaluationResult.from_rows(
        list(map(example_sums, groups)),
        example_ids=["a", "b"],
        reset_seeds=[7, 1 << 62],
        row_digests=["x", "y"],
        num_generations=2,
        trajectories=[item for group in groups for item in group],
    )
    write_examples(result, tmp_path / "examples.jsonl")
    again = read_examples(tmp_path / "examples.jsonl")
    assert again.rows == result.rows and again.example_ids == ["a", "b"] and again.num_generations == 2
    assert again.row_digests == ["x", "y"]
    assert again.panel == result.panel == result.to_dict()["panel"]
    (tmp_path / "examples.jsonl").write_text('{"example_id": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_examples(tmp_path / "examples.jsonl")
