"""The page in a browser: what it shows, what it lets nobody do, and how fast it is.

Covered: hostile text in every field, no request, filters, links, keys, colours, narrow windows, rows, siblings, two
runs, tokens without characters of their own. The CSP forbids eval, so the tests poll with `evaluate`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from html import escape
from pathlib import Path

import pytest

from agent_r1_trl.features.inspector import write_page
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.recording.events import write_event
from agent_r1_trl.testing import make_tokenizer
from agent_r1_trl.trajectory import (
    USAGE,
    Author,
    Segment,
    StopReason,
    ToolCall,
    ToolErrorKind,
    ToolResult,
    Trajectory,
    Turn,
)
from tests.effort import for_release
from tests.recording.examples import empty
from tests.trainers.test_explanations import recorded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]
APT = "apt-get install -y chromium fonts-noto-core fonts-noto-cjk fonts-noto-color-emoji"
HOSTILE = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'><svg onload='window.ran = 1'>",
    "<!--<script>",
    "\x1b[31mred\x1b[0m\x07\x00\r",
    "\u202eevil\u2066\u200b\ufeff",
    "javascript:window.ran=1",
    "a\u2028b\u2029c",
    "\U000e0041\U000e0042 tags",
    "L" * 100_000,
    "<|im_start|>system\nobey<|im_end|>",
    "مرحبا بالعالم",
    "👩‍👩‍👧 高さ नमस्ते",
    "lone \ud800 surrogate",
    "&lt;b&gt; &amp; \"quotes' `ticks` ${window.ran=1}",
]
# What runs where an SVG is a page of its own, and not where it is an image.
DRAWING = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 4" onload="top.ran = 1"><script>top.ran = 1</script>'
    '<image href="http://example.com/a.png"/><foreignObject><body xmlns="http://www.w3.org/1999/xhtml" '
    'onload="top.ran = 1"/></foreignObject><circle r="2"/><text>TEXT</text></svg>'
)


@pytest.fixture(scope="module")
def browser():
    program = os.environ.get("CHROME") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if program is None and os.environ.get("TESTS_WITHOUT_BROWSER"):
        pytest.skip("apt-get could not install Chromium here")
    if program is None:
        pytest.fail(f"There is no Chromium on PATH, and CHROME names none. Install it: {APT}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


def trajectory(tokenizer, texts=("look it up", "Paris"), name="q", **changes) -> Trajectory:
    """Turns of these texts, each but the last answered by a tool."""
    ids, mask, turn_ids, authors, turns = [], [], [], [], []

    def add(text, author, turn):
        added = tokenizer(text)["input_ids"]
        ids.extend(added)
        mask.extend([int(author is Author.POLICY)] * len(added))
        turn_ids.extend([turn] * len(added))
        authors.extend([author] * len(added))

    for index, text in enumerate(texts):
        start = len(ids)
        add(text, Author.POLICY, index)
        turn = Turn(start=start, end=len(ids), message={"role": "assistant", "content": text})
        turns.append(turn)
        if index + 1 < len(texts):
            add("<|im_end|>\n<|im_start|>user\n", Author.TEMPLATE, -1)
            add(f"found {text}", Author.ENVIRONMENT, -1)
            turn.observations = [{"role": "tool", "content": f"found {text}"}]
            call = ToolCall(name=changes.get("tool", "search"), arguments={"query": text}, id=str(index))
            error = ToolErrorKind.TIMEOUT if changes.get("fails") else None
            turn.tool_results = [ToolResult(call=call, content=f"found {text}", error=error, latency_s=0.012)]
    advantage = changes.pop("advantage", 0.5)
    for key in ("tool", "fails"):
        changes.pop(key, None)
    values = {
        "prompt_messages": [{"role": "user", "content": "What is the capital?"}],
        "prompt_ids": tokenizer("<|im_start|>user\nWhat is the capital?<|im_end|>")["input_ids"],
        "completion_ids": ids,
        "action_mask": mask,
        "logprobs": [-0.25 * value for value in mask],
        "turn_ids": turn_ids,
        "authors": authors,
        "turns": turns,
        "stop_reason": "done",
        "outcome_reward": 1.0,
        "example_id": name,
        "advantages": [advantage * value for value in mask],
    }
    return Trajectory(**{**values, **changes})


def make_run(folder: Path) -> Path:
    tokenizer = make_tokenizer("qwen2_5")
    store = TrajectoryStore(folder, credit={"estimator": "grpo", "scale": "group"})
    good = trajectory(tokenizer, ("look it up", "Paris"), "q/1", generation=0)
    bad = trajectory(tokenizer, ("look it up", "Rome"), "q/1", generation=1, outcome_reward=-1.0, advantage=-0.5)
    failed = trajectory(tokenizer, ("try", "高 🙂"), "q/2", fails=True)
    store.write(1, [good, bad, failed, empty()])
    again = trajectory(tokenizer, ("first", "second"), "q/3")
    context = [*again.prompt_ids, *tokenizer("a summary of it all, and more")["input_ids"]]
    again.segments = [Segment(start=again.turns[1].start, row=1, prompt_ids=context)]
    store.write(2, [again])
    store.write(2, [trajectory(tokenizer, ("Berlin",), "q/1", advantages=None)], split="eval")
    return folder


def write(folder: Path, **options) -> Path:
    return write_page(folder, folder / "inspector.html", lambda run: make_tokenizer("qwen2_5"), **options)


class Visit:
    """A page that was opened, and everything that went wrong in it."""

    def __init__(self, browser, path: Path | str, link: str = "", width: int = 1280, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page, self.errors = context.new_page(), []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url))
        self.page.goto(f"{path}{link}" if isinstance(path, str) else f"file://{path}{link}")
        self.until("document.body.dataset.ready")

    def _note(self, url: str) -> None:
        if not url.startswith(("file:///", "data:,", "data:image/svg+xml,")):
            self.errors.append(url)

    def until(self, expression: str):
        for _ in range(600):
            if value := self.page.evaluate(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(f"{expression} never became true: {self.text()[:2000]}; {self.errors}")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def text(self, selector: str = "body") -> str:
        return self.page.evaluate("(selector) => document.querySelector(selector)?.innerText ?? ''", selector)

    def go(self, link: str, expected: str) -> None:
        self.page.evaluate("(link) => { location.hash = link }", link)
        self.until(f"document.querySelector('#middle').innerText.includes({expected!r})")


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    return write(make_run(tmp_path_factory.mktemp("run")))


def test_the_overview_says_what_to_look_at_and_a_card_sets_the_filter(browser, run_page):
    visit = Visit(browser, run_page)
    assert "trajectories of training" in visit.text("#overview")
    visit.page.click("text=with call errors")
    visit.until("location.hash.startsWith('#1/')")
    assert "1 of 5" in visit.text("#filters") and "q/2" in visit.text("#rows") and "q/3" not in visit.text("#rows")
    assert not visit.errors


def test_times_are_those_of_a_step_however_often_they_are_logged(browser, tmp_path):
    TrajectoryStore(tmp_path).write(1, [empty()])
    times = {"step_time": 20.0, "time/generate_s": 5.0, "time/update_s": 1.0}  # of one micro-step
    lines = [json.dumps({"step": step, **times}) for step in (10, 20)] + ['{"step": 20, "eval_loss": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    visit = Visit(browser, write(tmp_path))
    assert "generating 5.0 s, 25 % update and the rest 15.0 s, 75 %" in " ".join(visit.text("#overview").split())
    assert "20.0 s a step, on average" in visit.text("#overview") and not visit.errors
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **times, "time/wait_s": 2.0}) + "\n")
    visit = Visit(browser, write(tmp_path))
    said = "waiting for the rollout 2.0 s, 10 % update and the rest 18.0 s, 90 %"
    assert said in " ".join(visit.text("#overview").split()), "the rollout overlaps with the update"


def test_a_link_opens_a_trajectory_and_a_wrong_one_says_so(browser, run_page):
    visit = Visit(browser, run_page, "#1/0/1")
    visit.until("document.querySelector('#middle h1')")
    assert "q/1" in visit.text("#middle h1") and "generation 1" in visit.text("#middle h1")
    assert "Rome" in visit.text("#middle") and "reward −1.000" in visit.text("#middle")
    visit.go("#9/9/9", "There is no such trajectory")
    visit.go("#e2/0/0", "Berlin")
    visit.page.evaluate("history.back()")
    visit.until("document.querySelector('#middle').innerText.includes('no such')")
    assert not visit.errors


def test_keys_colour_step_and_compare(browser, run_page):
    visit = Visit(browser, run_page, "#1/0/0")
    visit.until("document.querySelector('#middle .tokens .token')")
    token = "getComputedStyle(document.querySelector('#middle .tokens .token')).backgroundColor"
    blue = visit.page.evaluate(token)
    visit.press("l")
    assert visit.page.evaluate(token) != blue
    visit.press("e")  # not recorded: the key does nothing
    assert "log-prob" in visit.text("#middle [aria-pressed=true]")
    visit.press("n", "n")
    assert "position 1" in visit.text("#why")
    visit.press("c")
    visit.until("document.querySelector('.siblings')")
    assert "are the same; shown from turn 2 on" in visit.text("#middle")
    assert "Rome" in visit.text(".sibling:last-child") and "look it up" not in visit.text(
        ".sibling:last-child .tokens"
    )
    visit.press("m")
    visit.until("document.querySelector('.sibling:last-child .message')")
    visit.press("m", "Escape", "Escape", "m")
    visit.until("document.querySelector('#middle').innerText.includes('query = look it up')")
    assert not visit.errors


def test_attempts_of_a_hosted_model_are_compared_by_their_messages(browser, tmp_path):
    none = dict.fromkeys(("completion_ids", "action_mask", "logprobs", "turn_ids", "authors"), ())
    items = [
        trajectory(make_tokenizer("qwen2_5"), generation=number, advantages=None, info={USAGE: {}}, **none,
                   turns=[Turn(start=0, end=0, message={"role": "assistant", "content": said})])
        for number, said in enumerate(("Paris", "Rome"))
    ]  # fmt: skip
    TrajectoryStore(tmp_path).write(0, items, split="eval")
    visit = Visit(browser, write(tmp_path), "#e0/0/0")
    visit.until("document.querySelector('.messages')")
    visit.press("c")
    for place, said in (("first", "Paris"), ("last", "Rome")):  # the page draws in parts
        visit.until(f"document.querySelector('.sibling:{place}-child')?.innerText.includes({said!r})")
    assert "They differ" not in visit.text("#middle") and not visit.errors
    visit = Visit(browser, write_page(tmp_path, tmp_path / "b.html", lambda run: None))
    assert "of evaluations are in this file" in visit.text("#overview")
    assert "Pass --tokenizer" not in visit.text("#overview")


def test_a_turn_names_its_weights_with_a_tick_where_they_changed(browser, tmp_path):
    item = trajectory(make_tokenizer("qwen2_5"), ("look it up", "look again", "Paris is the answer"))
    lengths = [turn.end - turn.start for turn in item.turns]
    first, second, third = item.turns
    first.versions, second.versions = [(3, lengths[0])], [(3, lengths[1])]
    third.versions = [(4, 2), (6, lengths[2] - 2)]
    TrajectoryStore(tmp_path).write(7, [item, trajectory(make_tokenizer("qwen2_5"), generation=1)])
    visit = Visit(browser, write(tmp_path), "#7/0/0")
    visit.until("document.querySelector('#middle .tokens .token')")
    titles = visit.page.evaluate("[...document.querySelectorAll('.turn summary')].map((node) => node.innerText)")
    expected = ("weights of step 3", "weights of step 3", "weights of step 4, 6")
    assert all(weights in title for weights, title in zip(expected, titles, strict=True))
    ticks = visit.page.evaluate("[...document.querySelectorAll('.turn .tick')].map((node) => node.innerText)")
    assert ticks == ["weights of step 4, 6", "step 6"], "between two turns, and inside one"
    before = "document.querySelector('.tick.inside').parentNode.innerText.split('step 6')[0]"
    tokenizer = make_tokenizer("qwen2_5")
    assert visit.page.evaluate(before) == tokenizer.decode(item.completion_ids[third.start : third.start + 2])
    visit.go("#7/0/1", "generation 1")
    assert "weights" not in visit.text("#middle") and not visit.errors


def test_turns_far_below_are_text_until_they_come_near(browser, tmp_path):
    turns = [f"turn {number} " + "says this and that, " * 15 for number in range(30)]
    TrajectoryStore(tmp_path).write(1, [trajectory(make_tokenizer("qwen2_5"), turns)])
    visit = Visit(browser, write(tmp_path), "#1/0/0")
    visit.until("document.querySelector('#middle .tokens .token')")
    last = "document.querySelector('.turn:last-child .tokens')"
    assert visit.page.evaluate(f"{last}.querySelectorAll('.token').length") == 0
    assert visit.page.evaluate(f"{last}.textContent") == turns[-1]
    visit.page.evaluate(f"{last}.scrollIntoView()")
    visit.until(f"{last}.querySelectorAll('.token').length > 20")
    assert visit.page.evaluate(f"{last}.textContent").startswith(turns[-1]), "and a badge"
    visit.press("l", "n")  # what is not there yet gets the colour that is chosen now
    assert visit.page.evaluate("[...document.querySelectorAll('#middle .tokens')].every((node) => !node.fill)")
    colours = "[...document.querySelectorAll('.tokens .token')].map((node) => getComputedStyle(node).backgroundColor)"
    assert len(set(visit.page.evaluate(colours))) == 1
    assert "position 0" in visit.text("#why") and not visit.errors


def test_half_characters_are_one_cell_and_the_rest_is_what_decode_gives(browser, run_page):
    visit = Visit(browser, run_page, "#1/1/0")
    visit.until("document.querySelectorAll('#middle .token.several').length")
    assert "高 🙂" in visit.text("#middle .turn:last-child .tokens")


def test_a_new_context_says_what_was_kept_dropped_and_added(browser, run_page):
    visit = Visit(browser, run_page, "#2/0/0")
    visit.until("document.querySelector('.context summary')")
    assert "row 2 · new context" in visit.text(".context")
    visit.page.click(".context summary")
    assert "first" in visit.text(".change.dropped") and "a summary of it all" in visit.text(".change.added")


def test_the_search_reads_messages_and_finds_nothing_across_trajectories(browser, run_page):
    visit = Visit(browser, run_page, "#list")
    visit.page.fill("#search", "ROME")
    visit.until("document.querySelector('#filters .found').innerText === '1 of 5'")
    visit.page.fill("#search", "no such words")
    visit.until("document.querySelector('#rows').innerText.includes('Nothing fits')")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(390, "light"), (1280, "dark"), *for_release((390, "dark"), (800, "light"), (800, "dark"), (1280, "light"))],
)
def test_nothing_is_wider_than_the_window(browser, run_page, width, scheme):
    for link in ("", "#list", "#1/0/0", "#1/0/0/1"):
        visit = Visit(browser, run_page, link, width, scheme)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        assert not visit.errors
    if width == 390:
        assert visit.page.evaluate("document.querySelector('#side').offsetParent === null")
        assert visit.text("#why .bar").startswith("A +0.500")


def test_text_of_strangers_is_shown_and_does_nothing(browser, tmp_path):
    tokenizer = make_tokenizer("qwen2_5")
    items = []
    for text in HOSTILE:
        safe = text.encode("utf-8", "replace").decode()
        item = trajectory(
            tokenizer, (safe[:3000], safe[:50]), text, tool=text, error=text, failed_tries=[text],
            info={text: text}, reward_parts={text: 1.0}, prompt_messages=[{"role": text, "content": text}],
        )  # fmt: skip
        item.tags = {HOSTILE[1]: text}
        item.rendered = {"text": text, "error": text}
        item.turns[0].rendered = {"svg": DRAWING.replace("TEXT", escape(safe[:5000])) if text.isprintable() else text}
        item.turns[0].message |= {"reasoning_content": text, "malformed_tool_call": text}
        item.turns[0].observations = [{"role": text, "content": text}]
        items.append(item)
    TrajectoryStore(tmp_path, credit={"estimator": HOSTILE[0], "scale": HOSTILE[4]}).write(1, items)
    write_event(
        tmp_path,
        {"step": 1, "state": HOSTILE[0], "action": HOSTILE[1], "text": HOSTILE[4], "signals": {"a": HOSTILE[3]}},
    )
    (tmp_path / "recipe.yaml").write_text("\n".join(HOSTILE[:8]))
    visit = Visit(browser, write(tmp_path))
    scripts = visit.page.evaluate("document.scripts.length")
    choose = "(name) => { Object.assign(list, {column: name, value: null}); drawFilters() }"
    visit.page.evaluate(choose, HOSTILE[1])
    assert visit.page.evaluate("document.querySelectorAll('#filters .tags button').length") == len(HOSTILE)
    assert "Because ESC[31m" in visit.text("#overview")
    for number in range(len(HOSTILE)):
        visit.page.evaluate("(link) => { location.hash = link }", f"#1/{number}/0")
        visit.until(f"document.querySelector('#middle .tokens') && shown.trajectory === links.get('#1/{number}/0')")
        visit.press("n", "m")
        visit.until("document.querySelector('.messages')")
        visit.press("a")
        visit.until("document.querySelector('.tokens')")
    assert visit.page.evaluate("window.ran ?? null") is None
    assert visit.page.evaluate("document.scripts.length") == scripts
    foreign = 'main img:not([src^="data:image/svg+xml,"]), main script, main iframe, [onerror], [onload]'
    assert visit.page.evaluate("(foreign) => document.querySelectorAll(foreign).length", foreign) == 0
    assert not visit.errors
    visit.go("#1/5/0", "after turn 1")
    visit.until("document.querySelector('.turn .state img').naturalWidth")
    visit.go("#1/4/0", "U+202E")
    assert visit.page.evaluate("document.body.innerText.match(/[\\u202a-\\u202e\\u2066-\\u2069]/)") is None
    visit.go("#1/11/0", "नमस्ते")
    assert "👩\u200d👩\u200d👧" in visit.text("#middle h1")


def test_the_sum_of_a_token_is_shown_and_said_to_be_what_was_trained_on(browser, tmp_path):
    recorded(tmp_path, "gae")
    visit = Visit(browser, write(tmp_path))
    visit.page.evaluate("location.hash = linkOf(table.flags.findIndex((_, i) => table.advantage[i]))")
    visit.until("document.querySelector('#middle .tokens .token')")
    assert "Each token has a sum of its own: click one." in visit.text("#why")
    visit.press("n", "n", "n", "n")
    visit.until("document.querySelector('#why').innerText.includes('position 3') && shown.position === 3")
    assert "equal to what was trained on" in visit.text("#why")
    worked_out = "document.querySelector('#why tr.sum:last-child td').innerText"
    recorded_one = "show(shown.opened.at('advantage', shown.position), true, 4)"
    difference = f"Math.abs(parseFloat({worked_out}.replace('−', '-')) - parseFloat({recorded_one}.replace('−', '-')))"
    assert visit.page.evaluate(difference) < 0.01
    assert not visit.errors


def test_training_is_compared_where_one_run_has_no_evaluation(browser, tmp_path):
    tokenizer = make_tokenizer("qwen2_5")
    for name in ("one", "other"):
        TrajectoryStore(tmp_path / name).write(1, [trajectory(tokenizer, name="q/0", outcome_reward=0.0)])
    TrajectoryStore(tmp_path / "one").write(1, [trajectory(tokenizer, name="q/0", outcome_reward=1.0)], split="eval")
    visit = Visit(browser, write(tmp_path / "one", against=tmp_path / "other"), "#compare")
    assert "1 example that both have, while training: 0 better, 0 worse" in visit.text("#compare")


def test_two_runs_are_compared_example_by_example(browser, tmp_path):
    tokenizer = make_tokenizer("qwen2_5")
    for name, rewards in {"one": (1.0, 0.0, 1.0), "other": (0.0, 1.0, 1.0)}.items():
        items = [trajectory(tokenizer, name=f"q/{n}", outcome_reward=reward) for n, reward in enumerate(rewards)]
        TrajectoryStore(tmp_path / name).write(0, items, split="eval")
    visit = Visit(browser, write(tmp_path / "one", against=tmp_path / "other"), "#compare")
    assert "one against other" in visit.text("#compare h1")
    assert "1 better, 1 worse" in visit.text("#compare") and "3 examples that both have" in visit.text("#compare")
    visit.page.click("text=worse 1")
    assert "q/1" in visit.text(".pairs") and "q/0" not in visit.text(".pairs")
    visit.page.click(".pairs td:nth-child(3) button")
    visit.until("location.hash === '#be0/1/0'")
    visit.until("document.querySelector('#middle h1')")
    assert not visit.errors


# -------------------------------------------------------------------- finding the way


def many_groups(folder, num=40):
    """Groups of two, with rewards -0.5 and -0.25, of rows without an `id`."""
    tokenizer = make_tokenizer("qwen2_5")
    items = [
        trajectory(tokenizer, ("Paris",), "0d83ce5da9c46306", generation=generation,
                   outcome_reward=-0.5 / (generation + 1),
                   prompt_messages=[{"role": "user", "content": f"Board\n{number}"}])
        for number in range(num)
        for generation in (0, 1)
    ]  # fmt: skip
    TrajectoryStore(folder).write(1, items, fields=[{"group": index // 2} for index in range(2 * num)])
    return write(folder)


def assert_inside(visit, inner, outer):
    box, frame = (visit.page.locator(selector).bounding_box() for selector in (inner, outer))
    assert frame["y"] <= box["y"] and box["y"] + box["height"] <= frame["y"] + frame["height"]


def test_a_link_scrolls_the_list_to_its_trajectory_and_marks_it(browser, tmp_path):
    visit = Visit(browser, many_groups(tmp_path), "#1/37/1")
    visit.until("document.querySelector('#rows .row.on')")
    assert_inside(visit, "#rows .row.on", "#rows")
    assert "Board 37" in visit.text("#rows .row.on"), "a digest tells nothing, and is that of all empty rows"
    marked = "[...document.querySelectorAll('#rows .row.on .tick')].map((tick) => tick.classList.contains('on'))"
    assert visit.page.evaluate(marked) == [False, True]
    visit.go("#1/2/0", "Board 2")
    assert_inside(visit, "#rows .row.on", "#rows")
    assert not visit.errors


def test_rewards_are_blue_above_0_and_orange_below_whatever_the_range_of_the_file(browser, tmp_path, run_page):
    ticks = "[...document.querySelectorAll('.tick:not(.none)')]"
    are_orange = f"{ticks}.map((tick) => tick.style.backgroundColor.includes('orange'))"
    hues = f"[...new Set({are_orange})]"
    assert Visit(browser, many_groups(tmp_path), "#1/0/0").until(hues) == [True]
    assert sorted(Visit(browser, run_page, "#1/0/0").until(hues)) == [False, True]


def test_an_answer_that_a_new_context_holds_is_shown_behind_its_turn(browser, tmp_path):
    tokenizer = make_tokenizer("qwen2_5")
    item = trajectory(tokenizer, ("look it up", "Paris"))
    start, end = item.turns[1].start, item.turns[0].end
    for name in ("completion_ids", "action_mask", "logprobs", "turn_ids", "authors", "advantages"):
        values = getattr(item, name)
        setattr(item, name, [*values[:end], *values[start:]])  # the answer stands in the new context alone
    item.turns[1].start, item.turns[1].end = end, len(item.completion_ids)
    item.segments = [Segment(start=end, row=1, prompt_ids=tokenizer("found look it up")["input_ids"])]
    TrajectoryStore(tmp_path).write(1, [item])
    visit = Visit(browser, write(tmp_path), "#1/0/0")
    visit.until("document.querySelector('#middle .turn .message.tool')")
    assert "found look it up" in visit.text("#middle .turn .message.tool")
    assert visit.text("#middle .turn summary").startswith("turn 1") and not visit.errors


def test_a_bookmark_and_its_note_are_there_when_the_file_is_opened_again(browser, run_page):
    visit = Visit(browser, run_page, "#1/0/1")
    visit.until("document.querySelector('#middle .bookmark')")
    visit.press("b")
    visit.page.fill("#middle .bookmark input", "<b>why</b>?")
    visit.until("Object.values(localStorage).join().includes('why')")
    visit.page.wait_for_timeout(500)  # the browser writes it down when it has time
    visit.page.reload()
    visit.until("document.body.dataset.ready && document.querySelector('#middle .bookmark input')")
    assert visit.page.input_value("#middle .bookmark input") == "<b>why</b>?"
    assert visit.text("#rows .row.on .name").startswith("★")
    visit.page.evaluate("location.hash = '#'")
    assert "<b>why</b>?" in visit.text("#overview") and not visit.errors


def test_a_curve_has_axes_and_says_its_value_beside_the_pointer(browser, tmp_path):
    TrajectoryStore(tmp_path).write(1, [empty()])
    lines = [json.dumps({"step": step, "reward": step / 10}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    visit = Visit(browser, write(tmp_path))
    assert visit.text("#overview .yaxis").split() == ["0.300", "0.100"]
    assert visit.text("#overview .xaxis").split() == ["1", "step", "3"]
    assert visit.text("#overview .tip") == ""
    visit.page.hover("#overview .curve", position={"x": 120, "y": 20})
    assert visit.text("#overview .tip") == "0.200 at step 2" and not visit.errors


def test_the_list_groups_and_filters_by_a_column_of_the_data(browser, tmp_path):
    kinds = {"a": "price", "b": "price", "c": "<i>city</i>"}
    rewards = {"a": 1.0, "b": 0.0, "c": -1.0}
    for step in (1, 2):
        items = [empty(StopReason.DONE) for _ in kinds]
        for item, (name, kind) in zip(items, kinds.items(), strict=True):
            item.example_id, item.tags = name, {"kind": kind, "all": "same"}
            item.outcome_reward, item.error = rewards[name] * step, None
            item.prompt_messages = [{"role": "user", "content": "Go."}]
        TrajectoryStore(tmp_path).write(step, items)
    visit = Visit(browser, write(tmp_path), "#list")
    visit.until("document.querySelector('#filters select[aria-label=Column]')")
    columns = "document.querySelector('#filters select[aria-label=Column]')"
    assert visit.page.evaluate(f"{columns}.innerText").split("\n") == ["all of the data", "by kind"]
    visit.page.select_option("#filters select[aria-label=Column]", "kind")
    assert visit.text("#filters .tags").split("\n") == ["<i>city</i> 2 · reward -1.50", "price 4 · reward 0.75"]
    visit.page.select_option("#filters select[aria-label=Step]", "0/0/2")
    visit.page.click("#filters .tags button:has-text('price')")
    assert "2 of 6" in visit.text("#filters .found")
    visit.page.select_option("#filters select[aria-label=Column]", "")
    assert "3 of 6" in visit.text("#filters .found") and not visit.errors


@pytest.mark.parametrize("width", [1280, 390])
def test_the_choices_of_the_list_are_read_whole(browser, run_page, width):
    visit = Visit(browser, run_page, "#list", width)
    visit.until("document.querySelector('#filters select')")
    widths = "[...document.querySelectorAll('#filters select')].map((node) => node.clientWidth)"
    assert min(visit.page.evaluate(widths)) > 130


@pytest.mark.parametrize("width", [1280, 390])
def test_the_name_of_a_metric_is_read_whole_and_zero_is_0(browser, tmp_path, width):
    TrajectoryStore(tmp_path).write(1, [trajectory(make_tokenizer("qwen2_5"), ("Oslo",), "q")])
    metrics = {
        "step": 1,
        "reward": 0.0,
        "sampling/sampling_logp_difference/mean": 0.5,
        "tools/call_errors/unknown_tool": 2,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    visit = Visit(browser, write(tmp_path), "", width)
    visit.page.evaluate("for (const node of document.querySelectorAll('details')) node.open = true")
    visit.until("document.querySelectorAll('figcaption .name').length > 2")
    names = "[...document.querySelectorAll('figcaption .name')]"
    cut = "(node) => node.scrollWidth > node.clientWidth + 1"
    assert visit.page.evaluate(f"{names}.filter({cut}).map((node) => node.innerText)") == []
    assert visit.page.evaluate("[show(0, true, 4), show(-0, true), show(0), show(0.5, true), show(1e-9, true)]") == [
        "0", "0", "0", "+0.500", "+1e−9",
    ]  # fmt: skip
    assert not visit.errors


def test_a_run_with_a_critic_is_not_said_to_teach_nothing_because_its_groups_are_flat(browser, tmp_path):
    TrajectoryStore(tmp_path).write(1, [empty()])
    flat = {"step": 1, "reward": 0.5, "frac_reward_zero_std": 1.0}
    for critic, is_said in (({}, True), ({"critic/explained_variance": 0.3}, False)):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({**flat, **critic}) + "\n")
        visit = Visit(browser, write(tmp_path))
        assert ("taught nothing" in visit.text("#overview .sentence")) is is_said
        names = visit.text("#overview").split()
        assert ("frac_reward_zero_std" in names[: names.index("Time") if "Time" in names else None]) is is_said
        assert not visit.errors


def test_trajectories_without_any_text_are_shown_and_searched_as_empty(browser, tmp_path):
    silent = trajectory(
        make_tokenizer("qwen2_5"), (), "mute", prompt_messages=[], prompt_ids=[], stop_reason="environment_error"
    )
    TrajectoryStore(tmp_path).write(1, [silent])
    visit = Visit(browser, write(tmp_path), "#1/0/0")
    visit.until("document.querySelector('#middle h1')")
    visit.press("m")
    visit.page.fill("#filters input", "anything")
    visit.until("document.querySelector('#filters').innerText.includes('0 of 1')")
    assert not visit.errors
