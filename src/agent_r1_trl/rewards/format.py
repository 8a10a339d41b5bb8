"""The form of an answer: where it is in a text, and whether the text around it is well formed.

Reasoning (`<think>...</think>`) never counts as an answer, whatever answers are tried out in it. Tags are spelled
exactly: `<Think>` is ordinary text. All functions raise `ValueError` for what is no text, and for a tag that is not
the bare name of one, or that is the reasoning's where an answer's is asked for.
"""

from __future__ import annotations

import re
import unicodedata

THINK_TAG = "think"

_TAG_NAME = re.compile(r"[^<>/\s]+")
_INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Mn", "Me"}
"""Unicode categories of characters that show nothing by themselves: spaces, controls, marks on another character."""
FILLERS = "\u115f\u1160\u3164\uffa0\u2800"
"""Letters and a symbol that are drawn as a space."""


def strip_reasoning(text: str, tag: str = THINK_TAG) -> str:
    """Remove reasoning from a text: closed blocks, a block that was opened in the prompt, and an unclosed block.

    >>> strip_reasoning("<think>Oslo? No.</think>Bergen")
    'Bergen'
    """
    check_tag(text, tag)
    return "".join(_outside(text, tag)).strip()


def extract_answer(text: str, tag: str = "answer") -> str | None:
    """The content of the last complete `<answer>...</answer>` outside the reasoning, or None.

    A tag that is never closed is not an answer: the text may have been cut anywhere. What stands before and after a
    piece of reasoning never makes a tag together.

    >>> extract_answer("It is <answer> Paris </answer>.")
    'Paris'
    """
    check_answer_tag(text, tag)
    gap = f"<{THINK_TAG}>"  # stands in no part of the text that is left, so no tag is made where parts meet
    visible = gap.join(_outside(text, THINK_TAG))
    opener, closer = f"<{tag}>", f"</{tag}>"
    end = visible.rfind(closer)
    start = visible.rfind(opener, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    content = visible[start + len(opener) : end]
    previous = content.find(closer)  # "<answer>a</answer> b</answer>": the pair closes at the first closer
    return (content if previous < 0 else content[:previous]).replace(gap, "").strip()


def format_reward(text: str, *, tag: str | None = "answer", require_reasoning: bool = False) -> float:
    """1.0 if a final text is well formed, else 0.0.

    A text is well formed if it ends with its only `<answer>...</answer>`, which is not empty (with `tag=None`: if
    there is any text), and if it reasons at most once, in a block that is closed and stands before the answer (its
    opener may be in the prompt). `require_reasoning` asks for such a block that is not empty. White space and
    characters that show nothing, such as zero-width spaces, are empty.

    >>> format_reward("Two searches agree. <answer>Paris</answer>")
    1.0
    >>> format_reward("<answer>Paris</answer><think>Or is it?</think>")
    0.0
    """
    check_tag(text, THINK_TAG) if tag is None else check_answer_tag(text, tag)
    parts = split_tags(text, THINK_TAG)
    match parts[1::2]:
        case []:
            before, reasoning, after = "", "", text
        case [only] if only.startswith("</"):
            before, reasoning, after = "", parts[0], parts[2]
        case [first, second] if second.startswith("</") and not first.startswith("</"):
            before, reasoning, after = parts[0], parts[2], parts[4]
        case _:
            return 0.0
    if require_reasoning and is_empty(reasoning):
        return 0.0
    if tag is None:
        return float(not is_empty(before + after))
    opener, closer = f"<{tag}>", f"</{tag}>"
    has_one = before.count(opener) + after.count(opener) == 1 == before.count(closer) + after.count(closer)
    start = after.find(opener)
    if not has_one or start < 0 or not after.rstrip().endswith(closer):
        return 0.0
    return float(not is_empty(after[start + len(opener) :].rstrip().removesuffix(closer)))


def split_tags(text: str, tag: str) -> list[str]:
    """Text and tags in turn: the tags are at the odd places."""
    return re.split(f"(</?{re.escape(tag)}>)", text)


def _outside(text: str, tag: str) -> list[str]:
    """The parts of a text that are outside the blocks of a tag."""
    kept: list[str] = []
    depth = 0
    for part in split_tags(text, tag):
        if part == f"<{tag}>":
            depth += 1
        elif part == f"</{tag}>":
            if depth == 0:
                kept.clear()  # a chat template may open the block in the prompt; then everything so far was reasoning
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(part)
    return kept


def is_empty(text: str) -> bool:
    """Whether a text shows nothing: white space, invisible characters, marks on nothing."""
    return all(unicodedata.category(letter) in _INVISIBLE or letter in FILLERS for letter in text)


def check_tag(text: object, tag: object) -> None:
    """Refuse what is no text, and a tag that is not the bare name of one."""
    if not isinstance(text, str):
        raise ValueError(f"text={text!r:.200}: must be a string.")
    if not isinstance(tag, str) or not _TAG_NAME.fullmatch(tag):
        raise ValueError(f"tag={tag!r:.200}: must be the bare name of a tag, such as 'answer' for <answer>.")


def check_answer_tag(text: object, tag: object) -> None:
    """Refuse the tag of the reasoning, too."""
    check_tag(text, tag)
    if tag == THINK_TAG:
        raise ValueError(f"tag={tag!r}: reasoning is never an answer; choose another tag, such as 'answer'.")
