"""ReasoningGymEnv: questions from seeds, scores, and scorers that fail or would run the answer."""

import inspect
import re
import sys
import time

import pytest
import reasoning_gym

from agent_r1_trl.features.games import ReasoningGymEnv
from agent_r1_trl.features.games.reasoning import RUNS_ANSWERS
from agent_r1_trl.trajectory import StopReason
from tests.environments.helpers import finished
from tests.features.games.helpers import begun

MATHS = ["basic_arithmetic", "chain_sum", "decimal_arithmetic", "fraction_simplification", "gcd", "lcm", "products",
         "power_function", "prime_factorization", "simple_equations", "polynomial_equations"]  # fmt: skip


def scored(env, answer, **options):
    trajectory = finished(answer, **options)
    return env.outcome_reward(trajectory)[0], trajectory.info


@pytest.mark.parametrize("dataset", MATHS)
def test_the_generator_s_own_answer_earns_everything_and_nonsense_nothing(dataset):
    env = begun(ReasoningGymEnv, {"seed": 5}, dataset=dataset)
    right = str(reasoning_gym.create_dataset(dataset, seed=5, size=1)[0]["answer"])
    reward, info = scored(env, f"<think>hm</think><answer>{right}</answer>")
    assert (reward, info["success"], info["valid_answer"], info["answer"]) == (1.0, 1.0, 1.0, right)
    assert scored(env, "<answer>zxqv</answer>")[0] == 0.0


def test_the_prompt_is_the_question_and_the_form_of_the_answer():
    env = ReasoningGymEnv("chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    system, user = env.reset({"seed": 5})
    assert "<answer>" in system["content"] and re.search(r"\d [+-] \d =", user["content"])
    assert "answer only" in ReasoningGymEnv(answer_tag="").reset({})[0]["content"]


def test_a_row_may_name_the_generator_and_its_settings():
    env = begun(
        ReasoningGymEnv,
        {"dataset": "gcd", "options": {"max_value": 5, "x": None}, "seed": 1},
        options={"max_terms": 3},
    )
    assert max(env._entry["metadata"]["numbers"]) <= 5


def test_an_answer_that_only_contains_the_right_one_earns_nothing_unless_partial_credit_is_asked_for():
    env = begun(ReasoningGymEnv, {"seed": 5})
    right = env._entry["answer"]
    reward, info = scored(env, f"<answer>{right} or 1</answer>")
    assert reward == 0.0 and 0 < info["score"] < 1 and info["success"] == 0.0
    env = begun(ReasoningGymEnv, {"seed": 5}, partial_credit=True, success_reward=2.0, failure_reward=-1.0)
    assert scored(env, f"<answer>{right} or 1</answer>")[0] == pytest.approx(-1 + 3 * info["score"])


@pytest.mark.parametrize(
    "text", ["", "3", "<answer></answer>", "<answer>1" + "0" * 20_000 + "</answer>", "<answer>\ud800</answer>"]
)
def test_no_answer_or_an_endless_one_earns_nothing(text):
    assert scored(begun(ReasoningGymEnv, {"seed": 5}), text)[0] == 0.0


def test_an_answer_in_a_trajectory_that_was_cut_does_not_count():
    env = begun(ReasoningGymEnv, {"seed": 5})
    right = f"<answer>{env._entry['answer']}</answer>"
    assert scored(env, right, stop_reason=StopReason.MAX_COMPLETION_LENGTH)[0] == 0.0


@pytest.mark.parametrize(
    "scorer",
    [
        lambda *_: 1 / 0,
        lambda *_: sys.exit(3),
        lambda *_: time.sleep(3),
        lambda *_: None,
        lambda *_: float("nan"),
        lambda *_: "text",
    ],
)
def test_a_scorer_that_fails_or_hangs_scores_nothing_is_counted_and_named(scorer, caplog):
    env = begun(ReasoningGymEnv, {"seed": 5}, score_timeout_s=0.05)
    env._made.score_answer = scorer
    reward, info = scored(env, "<answer>3</answer>")
    assert (reward, info["score_failed"]) == (0.0, 1.0)
    assert "could not score an answer to 'chain_sum'" in caplog.text


@pytest.mark.parametrize("score", [7.0, -3.0])
def test_scores_stay_between_0_and_1(score):
    env = begun(ReasoningGymEnv, {"seed": 5}, partial_credit=True)
    env._made.score_answer = lambda *_: score
    assert scored(env, "<answer>3</answer>")[0] == (1.0 if score > 0 else 0.0)


@pytest.mark.parametrize("dataset", [*sorted(RUNS_ANSWERS), "composite"])
def test_generators_that_run_the_answer_are_refused(dataset):
    with pytest.raises(ValueError, match=f"dataset='{dataset}'"):
        ReasoningGymEnv(dataset)
    with pytest.raises(ValueError, match="dataset="):
        ReasoningGymEnv().reset({"dataset": dataset})


def test_the_list_of_those_that_run_the_answer_is_complete():
    """Read from the source of the installed package: who calls an evaluator in `score_answer`."""
    found = set()
    for name, (cls, _) in reasoning_gym.factory.DATASETS.items():
        source = inspect.getsource(cls.score_answer)
        if re.search(r"(?<!\w)(eval|exec|parse_expr|sympify|pickle)\W", source):
            found.add(name)
    harmless = {"number_sorting"}  # evaluates its own answer only
    assert found - harmless == RUNS_ANSWERS


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dataset": "no_such"}, "dataset='no_such'"),
        ({"dataset": None}, "dataset=None"),
        ({"dataset": ["gcd"]}, "dataset="),
        ({"options": {"no_such": 1}}, "no_such"),
        ({"options": {"max_terms": -1}}, "max_terms"),
        ({"score_timeout_s": 0}, "score_timeout_s=0"),
        ({"answer_tag": "<answer>"}, "answer_tag='<answer>'"),
        ({"partial_credit": "no"}, "partial_credit='no'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        ReasoningGymEnv(**arguments)
