"""Secrets of every form, made when they are asked for, so that no file of the repository holds one."""

import base64
import random
import re
import string

ALPHABETS = {
    "": string.ascii_letters + string.digits,
    "hex": "0123456789abcdef",
    "upper": string.ascii_uppercase + string.digits,
    "lower": string.ascii_lowercase,
    "digits": string.digits,
}


def secret_like(example: str) -> str:
    """An example of `secret_forms.FORMS` with its random parts filled in, the same ones every time."""
    chosen = random.Random(example)

    def fill(match: re.Match[str]) -> str:
        length, _, alphabet = match[1].partition(" ")
        if match[1] == "user and password":
            return base64.b64encode(b"me:" + b"Zk4" * 4).decode()
        if match[1] == "pem":
            return chosen.choice(["", "RSA ", "EC ", "DSA ", "OPENSSH ", "ENCRYPTED "])
        return "".join(chosen.choice(ALPHABETS[alphabet]) for _ in range(int(length)))

    return re.sub(r"\{(\d+(?: \w+)?|user and password|pem)\}", fill, example)


KEY = secret_like("{40}")
"""A generated key without a form of its own."""
WORDS = "correct horse"
"""A password that does not look generated."""
NUMBER = secret_like("{8 digits}")
"""A password of digits."""
