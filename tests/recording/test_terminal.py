"""What the terminal shows: colours by author, whole characters, nothing that steers the terminal."""

import re

import pytest

from agent_r1_trl.recording import Record, render_trajectory, summary_table
from agent_r1_trl.recording.terminal import decode_spans, render
from agent_r1_trl.testing import make_tokenizer
from agent_r1_trl.trajectory import Author, StopReason, Trajectory, Turn
from tests.recording.examples import empty, two_turns

BLUE, GREY, ORANGE = "\x1b[38;5;32m", "\x1b[38;5;244m", "\x1b[38;5;166m"
PIECES = [
    (Author.POLICY, '<tool_call>{"query": "東京🙂"}</tool_call><|im_end|>'),
    (Author.TEMPLATE, "\n<|im_start|>user\n"),
    (Author.ENVIRONMENT, "Zürich 首都 🚀"),
    (Author.TEMPLATE, "<|im_end|>\n<|im_start|>assistant\n"),
    (Author.POLICY, "naïve 東<|im_end|>"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("qwen3")


def from_pieces(tokenizer, pieces, **changes) -> Trajectory:
    """A trajectory whose completion is the pieces' ids, one turn per policy piece."""
    completion, authors, turn_ids, turns = [], [], [], []
    for author, text in pieces:
        ids = text if isinstance(text, list) else tokenizer.encode(text, add_special_tokens=False)
        if author is Author.POLICY:
            turns.append(Turn(start=len(completion), end=len(completion) + len(ids), message={"role": "assistant"}))
        turn_ids += [len(turns) - 1 if author is Author.POLICY else -1] * len(ids)
        completion += ids
        authors += [author] * len(ids)
    mask = [int(author is Author.POLICY) for author in authors]
    values = {
        "prompt_messages": [],
        "prompt_ids": tokenizer.encode("<|im_start|>user\n東京?<|im_end|>\n", add_special_tokens=False),
        "completion_ids": completion,
        "action_mask": mask,
        "logprobs": [-0.5 * value for value in mask],
        "turn_ids": turn_ids,
        "authors": authors,
        "turns": turns,
        "stop_reason": StopReason.DONE,
    }
    return Trajectory(**{**values, **changes})


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_spans_are_the_pieces_they_were_made_of(tokenizer):
    prompt, spans = decode_spans(from_pieces(tokenizer, PIECES), tokenizer)
    assert prompt == "<|im_start|>user\n東京?<|im_end|>\n"
    assert [(span.author, span.text) for span in spans] == PIECES
    assert [span.turn_id for span in spans] == [0, -1, -1, -1, 1]


def test_each_author_has_its_colour_and_no_character_is_broken(tokenizer):
    shown = render_trajectory(from_pieces(tokenizer, PIECES), tokenizer, 200)
    assert f'{BLUE}<tool_call>{{"query": "東京🙂"}}</tool_call><|im_end|>' in shown
    assert f"{ORANGE}Zürich 首都 🚀" in shown
    assert f"{GREY}<|im_start|>assistant↵" in shown
    assert "\ufffd" not in shown
    assert "naïve 東" in plain(shown)


def test_a_character_cut_by_the_token_limit_is_one_mark_and_what_follows_is_whole(tokenizer):
    rocket = tokenizer.encode("🚀", add_special_tokens=False)
    assert len(rocket) > 2
    pieces = [(Author.POLICY, rocket[:-1]), (Author.TEMPLATE, "<|im_end|>\n"), (Author.ENVIRONMENT, "東")]
    _, spans = decode_spans(from_pieces(tokenizer, pieces), tokenizer)
    assert "".join(span.text for span in spans) == "\ufffd<|im_end|>\n東"
    assert spans[-1].text == "東"


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma4", "gptoss"])
def test_joined_spans_are_the_decoded_stream(family):
    tokenizer = make_tokenizer(family)
    trajectory = from_pieces(tokenizer, [(author, f" {text} x") for author, text in PIECES])
    prompt, spans = decode_spans(trajectory, tokenizer)
    ids = [*trajectory.prompt_ids, *trajectory.completion_ids]
    assert prompt + "".join(span.text for span in spans) == tokenizer.decode(ids, skip_special_tokens=False)


def test_without_colour_action_tokens_stand_in_brackets(tokenizer):
    shown = render_trajectory(from_pieces(tokenizer, PIECES), tokenizer, 200, color=False)
    assert "\x1b" not in shown
    assert "⟦naïve 東<|im_end|>⟧" in shown and shown.count("⟦") == 2


def test_a_page_cannot_steer_the_terminal(tokenizer):
    evil = "\x1b[2J\x1b]0;title\x07\r\u202eabc\x9b31m"
    trajectory = from_pieces(
        tokenizer,
        [(Author.POLICY, "x"), (Author.ENVIRONMENT, evil)],
        example_id=evil,
        error=evil,
        info={evil: evil},
        reward_parts={evil: 0.0},
    )
    for shown in (render_trajectory(trajectory, tokenizer, 200), render_trajectory(trajectory, None, 200)):
        rest = plain(shown)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", rest)
        assert "␛[2J" in rest and "⟨U+202E⟩abc" in rest


def test_the_head_and_the_turns_say_what_happened():
    shown = render_trajectory(two_turns(), None, 120, color=False)
    assert "q/1 · generation 3" in shown
    assert "stop: done" in shown
    assert "reward: +1.000 = turns -0.100 + outcome +1.100 (answer +1.000, format +0.100)" in shown
    assert "4 policy (mask 1)  2 template  2 environment  3 prompt" in shown
    assert "turn 1 · reward -0.100 (tool_error -0.100) · advantage +0.700 · invalid · 1 call error" in shown
    assert "search(query='Höhe 🙂')  250 ms  call error: timeout" in shown
    assert "→ too slow" in shown
    assert "gold=['Oslo']" in shown


def test_a_trajectory_without_tokens_is_shown_with_its_error(tokenizer):
    shown = render_trajectory(empty(), tokenizer, 120, color=False)
    assert "prompt_too_long" in shown and "the prompt has 9000 tokens" in shown


def test_a_turn_in_which_nothing_was_sampled_is_still_listed(tokenizer):
    trajectory = from_pieces(tokenizer, [(Author.POLICY, "x")])
    trajectory.turns.append(Turn(start=1, end=1, message={"role": "assistant", "content": ""}, reward=-0.25))
    assert "turn 2 · reward -0.250" in render_trajectory(trajectory, tokenizer, 120, color=False)


def test_show_of_a_trajectory_is_this_rendering(tokenizer):
    trajectory = from_pieces(tokenizer, PIECES)
    assert trajectory.show(tokenizer, width=80) == render_trajectory(trajectory, tokenizer, 80)


def test_in_a_notebook_it_is_a_string_too(tokenizer, monkeypatch):
    expected = two_turns().show(tokenizer, width=90)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert two_turns().show(tokenizer, width=90) == expected != ""


def test_the_summary_has_a_line_per_trajectory(tmp_path):
    records = [
        Record(trajectory=two_turns(), step=4, split="eval", rank=0, index=1, path=tmp_path),
        Record(trajectory=empty(), step=5, split="train", rank=0, index=0, path=tmp_path),
    ]
    shown = render([summary_table(records)], width=140, color=False)
    first, second = (line.split() for line in shown.splitlines() if "#" in line)
    assert first == ["eval", "4", "1", "q/1#3", "done", "2", "1", "1", "8", "+1.000", "+1.100"]
    assert second[:4] == ["5", "0", "#0", "prompt_too_long"]
