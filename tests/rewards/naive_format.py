"""What the tags of a text mean, read letter by letter: slow, without regular expressions, apart from the package."""

import unicodedata

FILLERS = "\u115f\u1160\u3164\uffa0\u2800"


def read(text: str) -> list[tuple[str, str]]:
    """The text as ("open" | "close" | "text", letters)."""
    events: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        if text[at : at + 7] == "<think>":
            events.append(("open", ""))
            at += 7
        elif text[at : at + 8] == "</think>":
            events.append(("close", ""))
            at += 8
        else:
            events.append(("text", text[at]))
            at += 1
    return events


def visible_letters(text: str) -> list[str | None]:
    """The letters outside the reasoning; None where reasoning was taken out."""
    letters: list[str | None] = []
    depth = 0
    for kind, letter in read(text):
        if kind == "open":
            depth += 1
            letters.append(None)
        elif kind == "close" and depth:
            depth -= 1
        elif kind == "close":
            letters = []
        elif not depth:
            letters.append(letter)
    return letters


def naive_visible(text: str) -> str:
    return "".join(letter for letter in visible_letters(text) if letter is not None).strip()


def naive_answer(text: str, tag: str) -> str | None:
    """A pair opens at the last opener before a closer and closes at the next closer; the last pair counts."""
    letters = visible_letters(text)
    opener, closer = list(f"<{tag}>"), list(f"</{tag}>")
    answer, start = None, None
    for at in range(len(letters)):
        if letters[at : at + len(opener)] == opener:
            start = at + len(opener)
        elif letters[at : at + len(closer)] == closer and start is not None:
            answer, start = "".join(letter for letter in letters[start:at] if letter is not None).strip(), None
    return answer


def says_something(text: str) -> bool:
    hidden = {"Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Mn", "Me"}
    return any(unicodedata.category(letter) not in hidden and letter not in FILLERS for letter in text)


def naive_format(text: str, tag: str | None, require_reasoning: bool) -> float:
    kinds = [kind for kind, _ in read(text) if kind != "text"]
    if kinds not in ([], ["close"], ["open", "close"]):
        return 0.0
    parts = {"before": "", "inside": "", "after": ""}
    place = "inside" if kinds == ["close"] else "before" if kinds else "after"
    for kind, letter in read(text):
        if kind == "text":
            parts[place] += letter
        else:
            place = "inside" if kind == "open" else "after"
    if require_reasoning and not says_something(parts["inside"]):
        return 0.0
    if tag is None:
        return float(says_something(parts["before"] + parts["after"]))
    opener, closer = f"<{tag}>", f"</{tag}>"
    if opener in parts["before"] or closer in parts["before"]:
        return 0.0
    pieces = parts["after"].split(opener)
    if len(pieces) != 2 or closer in pieces[0]:
        return 0.0
    content, *rest = pieces[1].split(closer)
    return float(len(rest) == 1 and not rest[0].strip() and says_something(content))
