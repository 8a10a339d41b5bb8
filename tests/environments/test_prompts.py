"""What `datasets` makes of the calls in a prompt, and what of it the model reads: the arguments that were given."""

import asyncio
import datetime
import functools
import json
import logging

import pytest
from datasets import Dataset, load_dataset

from agent_r1_trl import ToolEnv
from agent_r1_trl.environments import prompts
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, SingleTurnEnv, TRLEnvAdapter
from agent_r1_trl.rollout.env_session import EnvSession
from agent_r1_trl.rollout.requests import RolloutRequest


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return "cold"


def search(
    query: str, filter: dict[str, int], tags: list[dict[str, str]], limit: int = 3, near: str | None = None
) -> str:
    """Search.

    Args:
        query: For what.
        filter: Bounds.
        tags: Names and values.
        limit: How many.
        near: Where.
    """
    return "nothing"


def asked(*calls):
    """A prompt whose assistant has made calls, (name, arguments) each."""
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    answers = [{"role": "tool", "content": "cold"} for _ in calls]
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": made}, *answers]


WEATHER = {"city": "Oslo"}
SEARCH = {"query": "q", "filter": {"since": 3}, "tags": [{"a": "x"}, {"b": "y"}], "limit": 2}
PARIS = {"query": "q", "filter": {"until": 9}, "tags": [], "near": "Paris"}
ROWS = [
    {"prompt": asked(("weather", WEATHER))},
    {"prompt": asked(("search", SEARCH))},
    {"prompt": asked(("search", PARIS))},
]


class Tools(ToolEnv):
    tools = (weather, search)


class Own:
    """An environment of the protocol alone."""

    tools = (weather, search)

    def reset(self, example):
        return example["prompt"]

    def step(self, message):
        return [], 0.0, True, {}


class OfTRL:
    def reset(self, **row):
        return None

    def weather(self, city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return "cold"


@pytest.fixture(autouse=True)
def heard(caplog):
    """The warnings, as if nothing had been said before."""
    for name in ("nullable", "unknown_tool", "times", "content", "tools"):
        getattr(prompts, f"_warn_of_{name}").cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def start(env, row):
    """The prompt with which a rollout begins."""
    session = EnvSession(env, truncate=lambda text, length: text)
    try:
        return asyncio.run(session.reset(RolloutRequest(example=row)))[0]
    finally:
        asyncio.run(session.close())


def arguments(messages):
    return [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]


def through_parquet(rows, folder):
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    return load_dataset("parquet", data_files=str(folder / "rows.parquet"), cache_dir=str(folder), split="train")


def through_json(rows, folder):
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_dataset("json", data_files=str(folder / "rows.jsonl"), cache_dir=str(folder), split="train")


MAKERS = {
    "from_list": lambda rows, folder: Dataset.from_list(rows),
    "parquet": through_parquet,
    "json": through_json,
    "use_json": lambda rows, folder: Dataset.from_list(rows, on_mixed_types="use_json"),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_earlier_calls_have_the_arguments_that_were_given(maker, tmp_path):
    data = MAKERS[maker](ROWS, tmp_path)
    read = [arguments(start(Tools, row))[0] for row in data]
    assert read[0] == WEATHER and read[2] == PARIS
    near = {"near": None} if maker in ("from_list", "parquet") else {}
    assert read[1] == {**SEARCH, **near}, "its schema allows null"
    assert [arguments(start(Own, row))[0] for row in data] == read
    assert [arguments(start(functools.partial(FunctionToolsEnv, [weather, search]), row))[0] for row in data] == read
    assert start(functools.partial(TRLEnvAdapter, OfTRL), data[0])[1] == ROWS[0]["prompt"][1]
    assert arguments(Tools().reset(data[0])) == [WEATHER], "by hand as well"


def test_a_null_that_may_have_been_given_is_kept_and_warned_of_once(heard):
    for row in [*Dataset.from_list(ROWS), *Dataset.from_list(ROWS)]:
        start(Tools, row)
    assert len(heard.messages) == 1 and "search" in heard.messages[0] and "'near'" in heard.messages[0]
    assert 'on_mixed_types="use_json"' in heard.messages[0]


def test_the_way_that_the_warning_names_keeps_nulls_apart(heard):
    rows = [*ROWS, {"prompt": asked(("search", {**SEARCH, "near": None}))}]
    data = Dataset.from_list(rows, on_mixed_types="use_json")
    assert [arguments(start(Tools, row))[0] for row in data] == [WEATHER, SEARCH, PARIS, {**SEARCH, "near": None}]
    assert heard.messages == []


def test_nulls_of_a_tool_that_is_not_there_stay_and_are_warned_of_once(heard):
    for row in Dataset.from_list(ROWS):
        read = arguments(start(SingleTurnEnv, row))[0]
        assert set(read) == {"city", "query", "filter", "tags", "limit", "near"}
    assert [text.split()[3] for text in heard.messages] == ["weather", "search"]
    assert all('on_mixed_types="use_json"' in text for text in heard.messages)


def test_objects_of_any_keys_keep_a_null_that_was_given():
    def find(query: dict) -> str:
        """Find.

        Args:
            query: What.
        """
        return ""

    rows = [{"prompt": asked(("find", {"query": given}))} for given in ({"gone": None, "a": 1}, {"b": 2})]
    env = functools.partial(FunctionToolsEnv, [find])
    kept = Dataset.from_list(rows, on_mixed_types="use_json")
    assert [arguments(start(env, row))[0]["query"] for row in kept] == [{"gone": None, "a": 1}, {"b": 2}]
    assert [arguments(start(env, row))[0]["query"] for row in Dataset.from_list(rows)] == [{"a": 1}, {"b": 2}]


def test_calls_are_read_in_whatever_form_the_row_has_them():
    call = {"type": "function", "function": {"name": "weather", "arguments": WEATHER}}
    nothing = {"type": "function", "function": {"name": "weather", "arguments": None}}
    said = {"role": "assistant", "content": None}
    for given, read in (
        (json.dumps([call]), [call]),
        ([json.dumps(call)], [call]),
        ([{**call, "id": None}], [call]),
        ([nothing], [{"type": "function", "function": {"name": "weather", "arguments": {}}}]),
        ([{"name": "weather", "arguments": None}], [{"name": "weather", "arguments": {}}]),
    ):
        row = {"prompt": [{"role": "user", "content": "?"}, {**said, "tool_calls": given}]}
        assert start(Tools, row)[1]["tool_calls"] == read
    for given in ([], None, "", "[]", "null"):
        row = {"prompt": [{"role": "user", "content": "?"}, {**said, "content": "No.", "tool_calls": given}]}
        assert start(Tools, row)[1] == {"role": "assistant", "content": "No."}


def test_numbers_texts_and_dates_are_what_the_schema_says(tmp_path, heard):
    def book(nights: int, price: float, code: str, day: str) -> str:
        """Book.

        Args:
            nights: How long.
            price: How much.
            code: Whose.
            day: When.
        """
        return ""

    env = functools.partial(FunctionToolsEnv, [book])
    base = {"nights": 3, "price": 2.5, "code": "x", "day": "2026-01-02T10:00:00"}
    rows = [{"prompt": asked(("book", base))}, {"prompt": asked(("other", {"nights": 3.5}))}]
    read = arguments(start(env, Dataset.from_list(rows)[0]))[0]
    assert read == base and type(read["nights"]) is int
    rows = [
        {"prompt": [{**message, "tool_calls": message.get("tool_calls", [])} for message in row["prompt"]]}
        for row in rows
    ]
    for row, code in zip(rows, ("4", 4), strict=True):
        row["prompt"][1]["tool_calls"][0]["function"]["arguments"] = {**base, "code": code}
    mixed = Dataset.from_list(rows, on_mixed_types="use_json")
    assert arguments(mixed[0]["prompt"][1:2])[0]["code"] == 4, "`datasets` reads the text as JSON"
    assert arguments(start(env, mixed[0]))[0] == {**base, "code": "4"}
    for row in rows:
        row["prompt"][1]["tool_calls"][0]["function"]["arguments"] = base
    timed = through_json(rows, tmp_path)
    assert arguments(timed[0]["prompt"][1:2])[0]["day"] == datetime.datetime(2026, 1, 2, 10)
    assert arguments(start(env, timed[0]))[0] == base
    assert len(heard.messages) == 1 and "book: day" in heard.messages[0]


def test_a_column_of_tools_that_is_not_offered_is_warned_of_once(heard):
    schema = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    for tools in ([schema], json.dumps([schema])):
        start(Tools, {"prompt": "?", "tools": tools})
    assert len(heard.messages) == 1 and "column 'tools'" in heard.messages[0]
    start(functools.partial(FunctionToolsEnv, [weather]), {"prompt": "?", "tools": [schema]})
    start(Tools, {"prompt": "?", "tools": ["maths"]})  # a column of the environment's own
    assert len(heard.messages) == 1


def test_texts_that_datasets_takes_for_numbers_are_warned_of(heard):
    blocks = [{"type": "text", "text": "Two"}, {"type": "text", "text": "words"}]
    rows = [{"prompt": [{"role": "user", "content": content}]} for content in ("1e3", blocks)]
    data = Dataset.from_list(rows, on_mixed_types="use_json")
    assert start(Tools, data[1])[0]["content"] == "Two\nwords" and heard.messages == []
    start(Tools, data[0])
    assert len(heard.messages) == 1 and "is a number" in heard.messages[0]


def test_blocks_in_messages_of_reset_and_step_are_text_and_data_stay_data():
    told = [{"type": "input_text", "text": "Two"}, "words"]

    class Blocks(Own):
        def reset(self, example):
            return [{"role": "user", "content": told}]

        def step(self, message):
            return [{"role": "user", "content": told}, {"role": "user", "content": [{"a": 1}]}], 0.0, False, {}

    async def play():
        session = EnvSession(Blocks, truncate=lambda text, length: text)
        messages, _ = await session.reset(RolloutRequest(example={}))
        step = await session.step({"role": "assistant", "content": ""})
        await session.close()
        return [message["content"] for message in (*messages, *step.observations)]

    assert asyncio.run(play()) == ["Two\nwords", "Two\nwords", [{"a": 1}]]
