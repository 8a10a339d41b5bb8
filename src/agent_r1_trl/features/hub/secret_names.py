"""Names under which secrets are kept: of keys, columns, variables and settings, in any spelling.

>>> [expected_under(name) for name in ("clientSecret", "X-API-Key", "hf_token", "HF_TOKEN_2")]
['any', 'any', 'any', 'any']
>>> [expected_under(name) for name in ("pad_token", "Authorization", "token")]
['generated', 'generated', 'generated']
>>> [expected_under(name) for name in ("max_tokens", "token_ids", "secret_santa", "key")]
['', '', '', '']
"""

from __future__ import annotations

import functools
import re
from typing import Literal

from agent_r1_trl import safe_text

Expected = Literal["", "any", "generated"]
"""Secrets under a name: none, any text but a placeholder, or only a text that looks generated."""

ANY_TEXT = (
    "password", "passwd", "passphrase", "passwords", "secret", "secrets", "credential", "credentials",
    "apikey", "apikeys", "accesskey", "accesskeys", "privatekey", "privatekeys", "secretkey", "secretkeys",
    "clientsecret", "connectionstring", "connstring",
)  # fmt: skip
"""Endings of names, without separators: any text under them is a secret. See `_WHOLE_WORDS`."""
GENERATED_TEXT = (
    "token", "authorization", "jwt", "bearer",
    "accountkey", "authkey", "encryptionkey", "masterkey", "servicekey", "sharedkey", "signingkey", "storagekey",
    "subscriptionkey", "licensekey", "deploykey",
)  # fmt: skip
"""Endings of names that mean other things as well, such as a tokenizer's `pad_token`."""
TOKEN_KINDS = {
    "access", "api", "app", "auth", "bearer", "bot", "deploy", "gh", "github", "gitlab", "hf", "hub", "id", "npm",
    "oauth", "personal", "pypi", "read", "refresh", "registry", "secret", "security", "service", "session", "slack",
    "wandb", "write",
}  # fmt: skip
"""Words in front of `token` that no tokenizer uses: any text is a secret under such a name."""
_WHOLE_WORDS = {"secret", "secrets", "credential", "credentials", "token", "jwt", "bearer"}
"""Endings that count only as a word; the others do in `dbpassword` as well."""
_SUFFIXES = {"value", "pem", "base64", "b64", "str", "string", "text", "raw", "bytes"}
_WITH_SUFFIX = {"key", "password", "passphrase", "secret"}  # but not `token_text`, which a tokenizer has
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_MAX_NAME_LENGTH = 120


def expected_under(name: str) -> Expected:
    """Secrets to expect under a name; names that the user has set in `secrets.names` come first."""
    rules = safe_text.rules()
    if rules.names.pattern != safe_text.SECRET_NAMES and rules.is_secret(name):
        return "any"
    return _expected(name)


def spells_a_secret_name(text: str) -> bool:
    """Whether a value is only a name itself, such as `api_key` or `mySecret`."""
    return text.isascii() and not re.search(r"[\s\d]", text) and bool(_expected(text))


@functools.lru_cache(maxsize=16384)
def _expected(name: str) -> Expected:
    if len(name) > _MAX_NAME_LENGTH:
        return ""
    words = _words(name)
    compact = "".join(words)
    if "public" in words:
        return ""
    if compact.endswith("token"):
        if _is_kind_of_access(words, compact):
            return "any"
        return "generated" if words[-1] == "token" else ""
    for endings, expected in ((ANY_TEXT, "any"), (GENERATED_TEXT, "generated")):
        for ending in endings:
            if words and compact.endswith(ending) and (words[-1] == ending or ending not in _WHOLE_WORDS):
                return expected  # type: ignore[return-value]
    return ""


def _words(name: str) -> list[str]:
    """Lower-case words of a name in any spelling, without numbers and encodings at its end."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1:
        is_encoding = words[-1] in _SUFFIXES and words[-2] in _WITH_SUFFIX
        if not is_encoding and not words[-1].isdigit():
            break
        words.pop()
    return words


def _is_kind_of_access(words: list[str], compact: str) -> bool:
    if words[-1] == "token":
        return len(words) > 1 and words[-2] in TOKEN_KINDS
    return compact.removesuffix("token") in TOKEN_KINDS  # authtoken, accesstoken
