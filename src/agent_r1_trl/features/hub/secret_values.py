"""Whether a text can be a secret: placeholders and references are none, and generated keys differ from words.

>>> [is_placeholder(text) for text in ("<your token>", "${HF_TOKEN}", 'os.environ["KEY"]', "hf_...", "xxxxx")]
[True, True, True, True, True]
>>> [looks_generated(text) for text in ("8f3kQ01xLmZ7", "abcd1234efgh567ijkl8")]
[True, True]
>>> [looks_generated(text) for text in ("multi-turn-agent-v2", "llama3instruct70b")]
[False, False]
"""

from __future__ import annotations

import re

from agent_r1_trl.features.hub.secret_names import spells_a_secret_name

WHOLE = {
    "in brackets": r"<.*>|\[.*\]|\{.*\}|\(.*\)|%.*%",
    "a variable of a shell or template": r"\$(?:[A-Z_][A-Z0-9_]*|[a-z_]+|[{(].*)|\{.*",
    "an expression": r"[A-Za-z_][\w.]{0,60}[(\[].{0,200}[)\]]"
    r"|(?:os|process|self|args|cfg|config|settings|env|secrets|request|ctx|st)\.[A-Za-z_][\w.]{0,80}",
    "a place": r"(?:env|file|vault|keyring|secretref|https?|s3|gs):.{0,500}|(?:~|\.{1,2})?/[a-z0-9_.\-/]{0,200}",
    "the name of a variable": r"[A-Z][A-Z0-9_]{0,80}(?:KEY|TOKEN|SECRET|PASSWORD|PASS|PWD)",
    "a setting": r"[A-Za-z_]{1,60}=[\w.]{1,60}",
    "one character": r"(?:[xX]*|\**|\.*|-*|_*|•*|0*|\?*)",
    "a word": r"(?i:null|none|nil|true|false|str|string|text|optional|required|default|unset|missing|hidden|masked"
    r"|empty|unknown|undefined|anonymous|fake|pass|pwd|user|username|local|test|testing"
    r"|not?[ _-]?(?:set|needed|required|used|key|auth|token)|optional\W.{0,200}|lm-studio|ollama)",
    "a sentence": r"(?i:(?:the|an?|your|enter|set|use|if|whether|must|should|optional|required|password|token|api)"
    r"[ ,:].{0,500})",
}
"""Kind of placeholder -> regular expression for all of it."""
INSIDE = (
    r"(?i:x{5,}|your|example|placeholder|redacted|change[ _-]?me|dummy|insert[ _-]|replace[ _-]|[ _-]here\b)"
    r"|\.\.\.|…|\*{3}|\$\{|\{\{|<[^<>]{1,60}>"
)
"""Parts of placeholders that no secret has."""
MIN_GENERATED_LENGTH = 10
MAX_MEAN_RUN = 3.0
"""Characters in a row that could belong to a word or a number. Random ones of both cases with digits have 1.5."""
MIN_NUMBERS = 3
"""Numbers inside one part; names such as `llama3instruct70b` have fewer."""

_WHOLE = re.compile(rf"(?:{'|'.join(WHOLE.values())})\Z", re.DOTALL)
_INSIDE = re.compile(INSIDE)
_PART = re.compile(rf"[A-Za-z0-9]{{{MIN_GENERATED_LENGTH},}}")
_RUN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_MAX_LENGTH = 1000


def is_placeholder(text: str) -> bool:
    """Whether a text stands where a secret would: `<your token>`, `${HF_TOKEN}`, `os.environ["KEY"]`, `xxxxx`."""
    text = text.strip().strip("\"'`")[:_MAX_LENGTH]
    return bool(_WHOLE.match(text) or _INSIDE.search(text)) or spells_a_secret_name(text)


def looks_generated(text: str) -> bool:
    """Whether letters and digits, or letters of both cases, take turns in some part of a text as in no word."""
    for part in _PART.findall(text[:_MAX_LENGTH]):
        runs = _RUN.findall(part)
        numbers = [run for run in runs if run.isdigit()]
        if len(runs) > len(numbers) >= MIN_NUMBERS or (len(runs) > 2 and len(part) / len(runs) < MAX_MEAN_RUN):
            return True
    return False
