"""The form of an answer: where it is in a text, and whether the text around it is well formed.

Reasoning (`<think>...</think>`) never counts as an answer, whatever answers are tried out in it.
"""

from __future__ import annotations

import re

THINK_TAG = "think"


def strip_reasoning(text: str, tag: str = THINK_TAG) -> str:
    """Remove reasoning from a text: closed blocks, a block that was opened in the prompt, and an unclosed block.

    >>> strip_reasoning("<think>Oslo? No.</think>Bergen")
    'Bergen'
    """
    _check_text(text)
    opener, closer = f"<{tag}>", f"</{tag}>"
    kept: list[str] = []
    depth = 0
    for part in re.split(f"({re.escape(opener)}|{re.escape(closer)})", text):
        if part == opener:
            depth += 1
        elif part == closer:
            if depth == 0:
                kept.clear()  # a chat template may open the block in the prompt; then everything so far was reasoning
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(part)
    return "".join(kept).strip()


def extract_answer(text: str, tag: str = "answer") -> str | None:
    """The content of the last complete `<answer>...</answer>` outside the reasoning, or None.

    A tag that is never closed is not an answer: the text may have been cut anywhere.

    >>> extract_answer("It is <answer> Paris </answer>.")
    'Paris'
    """
    visible = strip_reasoning(text)
    opener, closer = f"<{tag}>", f"</{tag}>"
    end = visible.rfind(closer)
    start = visible.rfind(opener, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    content = visible[start + len(opener) : end]
    previous = content.find(closer)  # "<answer>a</answer> b</answer>": the pair closes at the first closer
    return (content if previous < 0 else content[:previous]).strip()


def format_reward(text: str, *, tag: str | None = "answer", require_reasoning: bool = False) -> float:
    """1.0 if a final text is well formed, else 0.0.

    A text is well formed if it ends with its only `<answer>...</answer>`, which is not empty (with `tag=None`: if
    there is any text), and if its reasoning is closed, and present if required.

    >>> format_reward("Two searches agree. <answer>Paris</answer>")
    1.0
    """
    _check_text(text)
    opener, closer = f"<{THINK_TAG}>", f"</{THINK_TAG}>"
    num_closed = text.count(closer)
    if text.count(opener) > num_closed or num_closed > 1 or (require_reasoning and num_closed == 0):
        return 0.0
    visible = strip_reasoning(text)
    if tag is None:
        return float(bool(visible))
    is_single = visible.count(f"<{tag}>") == 1 and visible.count(f"</{tag}>") == 1
    return float(is_single and visible.endswith(f"</{tag}>") and bool(extract_answer(text, tag)))


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text={text!r:.200}: must be a string.")
