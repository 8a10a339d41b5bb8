"""What the suite costs, as `make durations` measured it last: a long test says why it is worth its time."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
DURATIONS = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))
LONG_S = 20.0
"""Seconds, on two cores with nothing else to do, from which a test is long."""
LONG = {
    "distributed/test_agreement.py": {
        "test_losses_and_gradient_norms_agree":
            "a training for each variant of the loss, on one process and on two, in one launch",
    },
    "distributed/test_echo.py": {
        "test_every_trajectory_keeps_its_own_tokens_while_ranks_take_no_turns_and_six":
            "ranks of unequal work, one of which waits for the other",
    },
    "distributed/test_failures.py": {
        "test_a_rank_on_which_everything_failed_ends_no_run": "the launch that all tests of its file read",
    },
    "distributed/test_four_ranks.py": {
        "test_four_ranks_train_as_one_process_does": "four processes on two cores",
    },
    "distributed/test_launch.py": {
        "test_a_launch_that_hangs_fails_and_its_processes_are_gone": "waits for a time limit",
    },
    "distributed/test_resume.py": {
        "test_a_resumed_run_has_the_losses_of_one_that_never_stopped":
            "three launches: a whole run, one that stops, one that goes on",
    },
    "distributed/test_two_machines.py": {
        "test_two_machines_train_together_and_one_ends_when_the_other_is_lost":
            "two network namespaces, and a time limit of the rendezvous",
    },
    "distributed/test_vllm_ranks.py": {
        "test_both_ranks_sample_from_the_trainers_weights": "the only ranks that share servers of real vLLM",
    },
    "features/doors/test_mcp_processes.py": {
        "test_a_server_that_hangs_as_a_whole_is_left_and_a_busy_one_is_not": "waits for the time limit of a session",
    },
    "features/sandbox/test_containment.py": {
        "test_limits_stop_what_the_page_says_and_no_more_than_the_system_itself_does":
            "a process for each attack on the table of the page",
        "test_root_and_another_user_are_stopped_alike": "the same attacks as another user of the system",
    },
    "generation/test_nccl_transfer.py": {
        "test_both_workers_of_a_tensor_parallel_server_get_their_halves_of_a_merged_adapter":
            "the start of a server of two workers",
    },
    "generation/test_real_server_faults.py": {
        "test_a_server_killed_in_a_rollout_and_started_again_puts_nothing_wrong_into_the_batch":
            "two starts of a real server",
    },
    "generation/test_vllm.py": {
        "test_each_rank_has_an_engine_of_its_own_inside_the_trainers_process_group": "two engines in one launch",
    },
    "generation/test_vllm_server.py": {
        "test_the_server_tells_its_context_and_says_that_a_request_is_too_long":
            "the start of the server that its file shares",
    },
    "test_benchmarks.py": {
        "test_a_benchmark_prints_a_table_and_its_figures_as_one_line_of_json":
            "a process for each program, with imports of its own",
    },
    "test_new_users_path.py": {
        "test_the_quickstart_trains_and_leaves_its_recipe":
            "the quickstart as a new user runs it, which all tests of its file read",
    },
    "trainers/test_vllm_training.py": {
        "test_grpo_trains_with_a_server_that_gets_the_adapter_alone": "the start of a server that loads adapters",
    },
}  # fmt: skip
"""File -> long test -> why it takes so long."""


def measured(target):
    """File and function of the tests that a target measured, with the seconds of the longest case."""
    longest = {}
    for name, costs in DURATIONS[target]["tests"].items():
        _, passed = (float(cost) for cost in costs.split(", "))
        function = name.partition("[")[0].removeprefix("tests/")
        longest[function] = max(passed, longest.get(function, 0.0))
    return longest


def test_every_long_test_says_why_it_is_worth_its_time():
    found = measured("make test") | measured("make test-release")
    explained = {f"{path}::{name}" for path, tests in LONG.items() for name in tests}
    assert {name for name, seconds in found.items() if seconds >= LONG_S} == explained


def test_every_test_that_was_measured_is_still_there():
    for function in measured("make test") | measured("make test-release"):
        path, _, name = function.partition("::")
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        fix = "Correct its name in durations.json, or run `make durations`."
        assert f"def {name.rpartition('::')[2]}(" in source, f"{function} is gone. {fix}"
