"""Recorded trajectories as documents of ATIF, which its own package reads."""

import importlib.util
import json
from dataclasses import replace

import atif
import pytest

from agent_r1_trl import __version__
from agent_r1_trl.cli import main
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.trajectory import USAGE, Segment, StopReason, ToolCall, ToolErrorKind, ToolResult
from tests.recording.examples import empty, two_turns


def export(tmp_path, trajectories, *arguments, recipe="seed: 0\n"):
    """The documents of a run with these trajectories, by file."""
    run = tmp_path / "run"
    TrajectoryStore(run, credit={"estimator": "grpo", "scale": "group"}).write(7, trajectories)
    TrajectoryStore(run).write(7, [two_turns(generation=5)], "eval")
    (run / "recipe.yaml").write_text(recipe)
    assert main(["export", str(run), "--atif", "--output", str(tmp_path / "out"), *arguments]) == 0
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((tmp_path / "out").iterdir())}
    return {name: atif.Trajectory.model_validate_json(text) for name, text in texts.items()}


def test_a_document_holds_messages_calls_results_ids_and_rewards(tmp_path):
    recipe = "env: agent_r1_trl.testing.toys.AddEnv\nmodel_name_or_path: some/model\n"
    (name, document), = export(tmp_path, [two_turns()], recipe=recipe).items()  # fmt: skip
    assert name == document.trajectory_id == "train_step_000007_0000"
    assert (document.schema_version, document.session_id) == ("ATIF-v1.8", "run")
    assert (document.agent.version, document.agent.model_name) == (__version__, "some/model")
    assert document.agent.tool_definitions[0]["function"]["name"] == "add"
    asked, searched, answered = document.steps
    assert (asked.source, asked.message) == ("user", "Hauptstadt?")
    call, = searched.tool_calls  # fmt: skip
    assert (call.tool_call_id, call.function_name, call.arguments) == ("call_0", "search", {"query": "Höhe 🙂"})
    result, = searched.observation.results  # fmt: skip
    assert (result.source_call_id, result.content, result.extra["error"]) == ("call_0", "too slow", "timeout")
    assert (searched.extra["reward"], searched.extra["is_invalid"], answered.message) == (-0.1, True, "Oslo")
    # S0 (2) + G0 (1) + O0 (2) + G0' (1) + S1 (2), after a prompt of 3
    first, second = searched.metrics, answered.metrics
    assert (first.prompt_token_ids, first.completion_token_ids) == ([5, 6, 7], [11, 12])
    assert (second.prompt_token_ids, second.completion_token_ids) == ([5, 6, 7, 11, 12, 13, 14, 15, 16], [17, 18])
    assert (first.logprobs, first.extra) == ([-0.1, -1 / 3], {"advantages": [0.7, 0.7]})
    final = document.final_metrics
    assert (final.total_prompt_tokens, final.total_completion_tokens, final.total_steps) == (12, 4, 3)
    assert final.extra == {"reward": 1.0, "outcome_reward": 1.1, "reward_parts": {"answer": 1.0, "format": 0.1}}
    item = two_turns()
    assert document.extra["rows"] == [
        {
            "prompt_ids": [5, 6, 7],
            "token_rewards": item.token_rewards(),
            **{name: getattr(item, name) for name in ("completion_ids", "action_mask", "logprobs", "advantages")},
        }
    ]
    told = {"step": 7, "split": "train", "estimator": "grpo", "example_id": "q/1", "stop_reason": "done"}
    assert told.items() <= document.extra.items() and document.extra["info"] == item.info


def test_a_rewritten_context_is_what_its_turn_was_sampled_after(tmp_path):
    rewritten = two_turns(segments=[Segment(start=6, row=1, prompt_ids=[8, 9])])
    document, = export(tmp_path, [rewritten]).values()  # fmt: skip
    assert [step.metrics.prompt_token_ids for step in document.steps if step.metrics] == [[5, 6, 7], [8, 9]]
    assert [(row["prompt_ids"], row["action_mask"]) for row in document.extra["rows"]] == [
        ([5, 6, 7], [1, 1, 0, 0, 0, 0]), ([8, 9], [1, 1]),
    ]  # fmt: skip


def test_a_prompt_may_hold_a_whole_conversation(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "x"}, call]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    document, = export(tmp_path, [two_turns(prompt_messages=prompt)]).values()  # fmt: skip
    system, agent, user, *turns = document.steps
    assert [step.source for step in document.steps] == ["system", "agent", "user", "agent", "agent"]
    assert [call.tool_call_id for call in agent.tool_calls] == ["x", "prompt_1_2"]
    assert all(call.arguments == {"a": 1} for call in agent.tool_calls)
    results = agent.observation.results
    assert [(result.source_call_id, result.content) for result in results] == [("x", "1"), (None, "2")]
    assert (system.message, user.message) == ("Be brief.", '[{"type":"text","text":"And?"}]')
    assert agent.is_copied_context and agent.metrics is None and not any(turn.is_copied_context for turn in turns)


def test_reasoning_user_turns_and_calls_that_could_not_be_read_have_their_places(tmp_path):
    item = two_turns()
    first, last = item.turns
    first.message = {"role": "assistant", "content": "hm", "reasoning_content": "I need \ud800."}
    call = ToolCall(name="", arguments="search(", id="call_1_malformed")
    first.tool_results = [ToolResult(call=call, content="Error: no JSON", error=ToolErrorKind.MALFORMED)]
    first.observations = [{"role": "user", "content": "Error: no JSON"}, {"role": "user", "content": "Go on."}]
    first.message["tool_calls"] = [{"function": {"name": name, "arguments": {}}} for name in ("made", "surplus")]
    last.summary_request = {"role": "user", "content": "Summarise."}
    document, = export(tmp_path, [item]).values()  # fmt: skip
    said = [(step.source, step.message) for step in document.steps]
    assert said == [
        ("user", "Hauptstadt?"), ("agent", "hm"), ("user", "Go on."), ("user", "Summarise."), ("agent", "Oslo"),
    ]  # fmt: skip
    turn = document.steps[1]
    assert turn.reasoning_content == "I need ?." and turn.observation.results[0].content == "Error: no JSON"
    assert (turn.tool_calls[0].arguments, turn.tool_calls[0].extra) == ({}, {"arguments": "search("})
    assert [(call.tool_call_id, call.function_name) for call in turn.tool_calls[1:]] == [("call_1_2", "surplus")]
    assert document.steps[-1].extra["is_summary"]


def test_trajectories_without_ids_have_no_metrics(tmp_path):
    turns = [replace(turn, start=0, end=0) for turn in two_turns().turns]
    per_token = {key: [] for key in ("completion_ids", "action_mask", "logprobs", "turn_ids", "authors")}
    info = {USAGE: {"completion_tokens": 9}}
    hosted = two_turns(prompt_ids=[], turns=turns, info=info, advantages=None, **per_token)
    documents = export(tmp_path, [hosted, empty(StopReason.PROMPT_TOO_LONG)]).values()
    for document, num_steps in zip(documents, (3, 0), strict=True):
        assert len(document.steps) == num_steps and not any(step.metrics for step in document.steps)
        assert document.final_metrics.total_completion_tokens is None and document.extra["rows"] == []


def test_split_and_reward_choose(tmp_path):
    items = [two_turns(), two_turns(outcome_reward=0.0, reward_parts={})]
    assert list(export(tmp_path, items, "--min_reward", "1")) == ["train_step_000007_0000"]
    run = str(tmp_path / "run")
    assert main(["export", run, "--atif", "--split", "all", "--output", str(tmp_path / "all")]) == 0
    documents = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "all").iterdir()}
    assert sorted(documents) == ["eval_step_000007_0000", "train_step_000007_0000", "train_step_000007_0001"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "out", "--sft"), "--sft, --atif: one export has one form"),
        (("--output", "out", "--min_reward", "5"), "is recorded there with split=train and min_reward=5.0"),
        (("--output", "."), "is not empty. Pass a directory that does not exist yet"),
    ],
)
def test_mistakes_are_refused(tmp_path, capsys, monkeypatch, arguments, message):
    TrajectoryStore(tmp_path / "run").write(1, [two_turns()])
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "--atif", *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_the_package_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    TrajectoryStore(tmp_path / "run").write(1, [two_turns()])
    name = "agent_r1_trl.features.hub.export_command.find_spec"
    monkeypatch.setattr(name, lambda name: None if name == "atif" else importlib.util.find_spec(name))
    assert main(["export", str(tmp_path / "run"), "--atif", "--output", str(tmp_path / "out")]) == 2
    assert "pip install 'agent-r1-trl[atif]'" in capsys.readouterr().err
