"""The page as a file: what it holds, what it may run, and that the record comes out of it as it went in.

Covered: blocks and columns, groups of older records, the size limit, the policy and its hashes, JSON in HTML, secrets,
the one function that writes text, the wheel. Not covered: what a browser makes of it (test_browser.py).
"""

from __future__ import annotations

import base64
import configparser
import fnmatch
import hashlib
import json
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.features.inspector import page, write_page
from agent_r1_trl.features.inspector.pack import FLAGS, Block, numbered_groups
from agent_r1_trl.recording import TrajectoryStore, read_records
from agent_r1_trl.testing import make_tokenizer
from tests.recording.examples import empty, two_turns
from tests.trainers.test_explanations import recorded

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    store = TrajectoryStore(folder, credit={"estimator": "grpo", "scale": "group"})
    store.write(1, [two_turns(generation=0), two_turns(generation=1, outcome_reward=-1.0)])
    store.write(2, [two_turns(generation=g, example_id=name) for name in "ab" for g in range(2)] + [empty()])
    store.write(2, [two_turns(example_id="judged")], split="eval")
    make_tokenizer("qwen2_5").save_pretrained(folder)
    return folder


def inflate(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text), -15)


def blocks_of(html: str) -> dict[str, str]:
    return dict(re.findall(r'<script type="text/plain" id="(\w+)">(.*?)</script>', html, re.DOTALL))


def read_page(folder, path, **options):
    tokenizer = make_tokenizer("qwen2_5")
    html = write_page(folder, path, lambda run: tokenizer, **options).read_text(encoding="utf-8")
    return html, json.loads(blocks_of(html)["meta0"])


def unpack(html: str, number: int):
    data = inflate(blocks_of(html)[f"block{number}"])
    length = struct.unpack("<I", data[:4])[0]
    head = json.loads(data[4 : 4 + length])
    at = 4 + length
    numbers = {}
    for name, width, kind in (("ids", 3, "<u4"), ("f2", 2, "<f2"), ("f4", 4, "<f4")):
        count = head[name]
        planes = np.frombuffer(data[at : at + width * count], "u1").reshape(width, count)
        whole = np.zeros((count, np.dtype(kind).itemsize), "u1")
        whole[:, :width] = planes.T
        numbers[name] = whole.reshape(-1).view(kind)
        at += width * count
    assert at == len(data)
    return head["items"], numbers


def test_ids_columns_and_texts_come_out_as_they_went_in(run_folder, tmp_path):
    html, meta = read_page(run_folder, tmp_path / "a.html")
    tokens, at = [], 0
    lengths = np.frombuffer(inflate(meta["vocabulary"]["lengths"]), "<u2")
    for length in lengths:
        tokens.append(inflate(meta["vocabulary"]["bytes"])[at : at + length])
        at += length
    index, item = meta["index"], two_turns()
    assert index["step"] == [2, 2, 2, 2, 2, 2, 1, 1]  # the last steps first
    items, numbers = unpack(html, index["block"][0])
    head = items[index["slot"][0]]
    place, count = head["completion"]
    tokenizer = make_tokenizer("qwen2_5")
    shown = [tokens[number] for number in numbers["ids"][place : place + count]]
    assert b"".join(shown).decode("utf-8", "replace") == tokenizer.decode(item.completion_ids)
    assert head["authors"] == [0, 2, 1, 1, 2, 2, 1, 1, 0, 2]
    kind, place = head["columns"]["logprob"]
    policy = [value for value, mask in zip(item.logprobs, item.action_mask, strict=True) if mask]
    assert kind == 2 and np.allclose(numbers["f2"][place : place + 4], policy, rtol=1e-3)
    assert head["columns"]["advantage"] == [0, 0.7]
    text = inflate(blocks_of(html)["text0"]).decode("utf-8")
    start, length = index["text_start"][0], index["text_length"][0]
    assert text[start : start + length] == "Hauptstadt?\ntoo slow\nOslo\n"
    assert head["badges"] == [[1, "tool_error", -0.1], [7, "answer", 1.0], [7, "format", 0.1]]


@pytest.fixture(scope="module")
def explained_run(tmp_path_factory):
    """A run of GAE with values far from 0, of which float16 keeps three digits."""
    folder = tmp_path_factory.mktemp("explained")
    recorded(folder, "gae")
    return folder


def test_the_sums_of_a_token_lead_to_its_advantage(explained_run, tmp_path):
    html, meta = read_page(explained_run, tmp_path / "a.html")
    gap, num = 1 << FLAGS.index("gap"), 0
    for place, record in enumerate(in_order(meta, explained_run)):
        items, numbers = unpack(html, meta["index"]["block"][place])
        head = items[meta["index"]["slot"][place]]
        policy = sum(record.trajectory.action_mask)

        def column(kind, value, last=None, policy=policy, numbers=numbers, head=head):
            if kind == 1:
                return np.append(value * column(*head["columns"]["value"])[1:], last)
            return np.full(policy, value) if kind == 0 else numbers[f"f{kind}"][value : value + policy]

        sums = {label: column(*packed) for label, *packed in head["why"]["tokens"] if packed}
        if policy and sums:
            left_out = [label for label, *packed in head["why"]["tokens"] if not packed]
            assert left_out == ["+ 0.97 * 0.8 * raw advantage of the next token", "= raw advantage", "= advantage"]
            reward, following, value, mean, std = sums.values()
            raw = column(*head["columns"]["advantage"]) * std + mean
            added = raw - (reward + following - value)
            assert np.allclose(added[:-1], 0.97 * 0.8 * raw[1:], atol=0.02) and abs(added[-1]) < 0.02
            num += 1
        assert not meta["index"]["flags"][place] & gap
    assert num > 8


def test_an_advantage_that_was_not_trained_on_so_is_flagged(explained_run, tmp_path):
    copy = shutil.copytree(explained_run, tmp_path / "run")
    path = copy / "trajectories" / "step_000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = next(number for number, line in enumerate(lines) if any(line["advantages"]))
    lines[wrong]["advantages"] = [1.5 * value for value in lines[wrong]["advantages"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, meta = read_page(copy, tmp_path / "a.html")
    flagged = [
        (meta["index"]["step"][place], meta["examples"][meta["index"]["example"][place]])
        for place, flags in enumerate(meta["index"]["flags"])
        if flags & 1 << FLAGS.index("gap")
    ]
    assert flagged == [(1, lines[wrong]["example_id"])]


def in_order(meta, folder):
    """The records of a run as they stand in the index."""
    records = {(r.step, r.group, r.trajectory.generation): r for r in read_records(folder, split="train")}
    index = meta["index"]
    return [records[key] for key in zip(index["step"], index["group"], index["generation"], strict=True)]


def test_badges_sit_where_token_rewards_places_them(run_folder, tmp_path):
    html, meta = read_page(run_folder, tmp_path / "a.html")
    items, _ = unpack(html, meta["index"]["block"][0])
    item = two_turns()
    sums = [0.0] * len(item.completion_ids)
    for position, _, value in items[meta["index"]["slot"][0]]["badges"]:
        sums[position] += value
    assert np.allclose(sums, item.token_rewards())


def test_flags_say_what_is_wrong_with_a_trajectory(run_folder, tmp_path):
    _, meta = read_page(run_folder, tmp_path / "a.html")
    names = [{name for bit, name in enumerate(FLAGS) if flags >> bit & 1} for flags in meta["index"]["flags"]]
    assert names[0] == {"call_errors", "invalid", "same"}
    assert names[6] == {"call_errors", "invalid"} and names[7] == {"call_errors", "invalid"}
    lost = meta["index"]["stop"].index(meta["stops"].index("prompt_too_long"))
    assert names[lost] == {"lost", "untrained"} and meta["index"]["reward"][lost] is None


def test_groups_of_older_records_are_counted_in_their_order(run_folder):
    records = list(read_records(run_folder, step=2, split="train"))
    found = [(number, [item.trajectory.example_id for item in group]) for number, group in numbered_groups(records)]
    assert found == [(0, ["a", "a"]), (1, ["b", "b"]), (2, [""])]


def test_a_page_that_would_be_too_large_holds_the_last_steps_and_says_so(run_folder, tmp_path):
    _, meta = read_page(run_folder, tmp_path / "a.html", max_bytes=1)
    assert meta["runs"][0]["steps"] == [2] and meta["runs"][0]["left_out"] == [1]
    assert set(meta["index"]["step"]) == {2}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("entropy", [0.5, 0.5], [0, 0.5]),
        ("entropy", [np.nan, np.nan], [0, None]),
        ("entropy", [0.1, np.nan], [2, 0]),
        ("entropy", [1e5, 1.0], [4, 0]),
        ("advantage", [0.1, 0.2], [4, 0]),
    ],
)
def test_a_column_is_as_narrow_as_its_numbers_allow(name, values, expected):
    assert Block().add_column(name, np.array(values, np.float32)) == expected


def test_what_is_written_as_32_bits_is_right_in_five_digits():
    block, values = Block(), np.float32([1.234567, -0.000123456, 70_000.123])
    block.add_column("advantage", values)
    assert np.allclose(block.floats[4][0].view("<f4"), values, rtol=1e-5, atol=0)


# -------------------------------------------------------------------- what may run


def test_the_policy_names_the_hash_of_the_one_script_and_the_one_style(run_folder, tmp_path):
    html, _ = read_page(run_folder, tmp_path / "a.html")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    assert "connect-src" not in policy and "fetch(" not in html  # what is served alone has (test_live.py)
    scripts, styles = (
        re.findall(r"<script>(.*?)</script>", html, re.DOTALL),
        re.findall(r"<style>(.*?)</style>", html, re.DOTALL),
    )
    for name, (content,) in {"script-src": scripts, "style-src": styles}.items():
        digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy


def test_no_text_of_the_record_can_end_the_block_that_it_stands_in(tmp_path):
    hostile = "</script><script>alert(1)</script><!--<script>"
    TrajectoryStore(tmp_path).write(
        1, [two_turns(example_id=hostile, info={hostile: hostile}, reward_parts={hostile: 1.1})]
    )
    html, meta = read_page(tmp_path, tmp_path / "a.html")
    assert html.count("<script") == html.count("</script>") == 1 + len(blocks_of(html))
    assert "<script>alert" not in html and meta["examples"] == [hostile]
    assert "<" not in blocks_of(html)["meta0"]


WRITES = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|(?<![.\w])eval\s*\(|new Function|\.textContent\s*=|innerText|"
    r"createTextNode|\.nodeValue|\.(?:append|prepend|before|after)\(|srcdoc|\.src\b|setTimeout\(\s*[\"'`]|"
    r"createContextualFragment|DOMParser|on\w+\s*=\s*[\"']"
)


def test_one_function_alone_writes_text_into_the_page_and_one_draws_images():
    found = []
    for path in sorted((page.WEB).glob("*.js")):
        source = path.read_text(encoding="utf-8")
        if path.name == "put.js":
            for function in ("function put(", "function picture("):
                start = source.index(function)
                source = source[:start] + source[source.index("\n}\n", start) :]
        found += [f"{path.name}: {line.strip()}" for line in source.splitlines() if WRITES.search(line)]
    assert not found
    assert page.SCRIPTS and {path.stem for path in page.WEB.glob("*.js")} == {*page.SCRIPTS.split(), "follow"}


def test_attributes_get_words_of_the_page_alone():
    allowed = {"aria-label", "aria-pressed", "aria-selected", "aria-current", "role", "name", "x1", "x2"}
    found = {
        name
        for path in page.WEB.glob("*.js")
        for name in re.findall(r"setAttribute\(\"?([\w-]+)", path.read_text(encoding="utf-8"))
    }
    assert found <= allowed


def test_secrets_in_recipe_and_metrics_are_masked(run_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret-0123")
    (run_folder / "recipe.yaml").write_text("key: sk-very-secret-0123\nbeta: 0.0\n")
    state = {"log_history": [{"step": 1, "reward": 0.5, "sk-very-secret-0123": 1.0}]}
    (run_folder / "trainer_state.json").write_text(json.dumps(state))
    html, meta = read_page(run_folder, tmp_path / "a.html")
    assert "very-secret" not in html and "beta: 0.0" in meta["runs"][0]["recipe"]
    assert meta["runs"][0]["metrics"]["reward"] == [0.5]


# -------------------------------------------------------------------- the command and the wheel


def test_view_writes_the_page_into_the_run_and_prints_its_path(run_folder, capsys):
    assert main(["view", str(run_folder)]) == 0
    assert Path(capsys.readouterr().out.strip()) == run_folder / "inspector.html"
    assert (run_folder / "inspector.html").stat().st_size > 50_000
    assert not list(run_folder.glob("*.tmp"))


def test_view_writes_the_page_of_a_file_beside_it_and_elsewhere_on_request(run_folder, capsys, tmp_path):
    file = run_folder / "trajectories" / "step_000001.jsonl"
    assert main(["view", str(file)]) == 0 and file.with_suffix(".html").is_file()
    file.with_suffix(".html").unlink()
    assert main(["view", str(run_folder), "--html", str(tmp_path / "deep" / "x.html")]) == 0
    assert (tmp_path / "deep" / "x.html").is_file()


def test_a_run_without_trajectories_is_refused(tmp_path, capsys):
    assert main(["view", str(tmp_path)]) == 2
    assert "holds no recorded trajectories" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "nowhere")]) == 2


def test_the_files_of_the_page_are_data_of_the_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["*"].replace("\n", "").split(", ")
    names = [str(path.relative_to(page.WEB.parent)) for path in page.WEB.iterdir()]
    assert len(names) > 10 and all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in names)


def test_the_page_stays_small():
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in page.WEB.iterdir()}
    assert sum(map(len, lines.values())) <= 2500
    assert not [path.name for path in lines if path.suffix == ".js" and max(map(len, lines[path])) > 130]
