r"""Secrets that can be told by their form, whatever stands around them: one table, a row for each form.

A pattern is tried only where one of its `beginnings` stands. It begins with that text and repeats nothing without an
upper limit, so that the time for a text grows with its length alone.

    >>> [match.form.name for match in find_forms("key: AKIA" + "Z7" * 8)]
    ['AWS access key']
    >>> list(find_forms("key: AKIA" + "X" * 16))
    []
"""

from __future__ import annotations

import base64
import re
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

from agent_r1_trl.features.hub.secret_values import is_placeholder, looks_generated

_UPPER_TO_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_STARTS_A_WORD = r"(?:(?<![A-Za-z0-9])(?<![A-Za-z0-9][_\-])|(?<=\\[nrt]))"
"""Not inside a word, and not inside base64 for URLs; the letter of an escaped newline in source code is none."""


def _accept(secret: str) -> bool:
    return True


def _is_user_and_password(secret: str) -> bool:
    """Whether base64 spells `user:password`."""
    padded = secret.rstrip("=") + "=" * (-len(secret.rstrip("=")) % 4)
    try:
        decoded = base64.b64decode(padded, altchars="-_" if set(secret) & set("-_") else None, validate=True)
    except ValueError:
        return False
    return b":" in decoded and decoded.isascii() and decoded.decode().isprintable()


class SecretForm(NamedTuple):
    """A row of the table."""

    name: str
    """Shown in place of the secret."""
    beginnings: str
    """Texts with which such a secret begins, in lower case, separated by `|`."""
    pattern: str
    """Regular expression; the group `secret`, if there is one, is the part that must not be a placeholder."""
    examples: tuple[str, ...]
    """With the random parts as `{length}` (letters of both cases and digits), `{length hex}`, `{length upper}` (upper
    case and digits), `{length lower}` or `{length digits}`: a real-looking one would itself be found."""
    accepts: Callable[[str], bool] = _accept
    """A further condition on the secret."""
    starts_a_word: bool = True
    """Whether no letter or digit stands in front."""


# fmt: off
FORMS = (
    # ------------------------------------------------------------ models and their tools
    SecretForm("Hugging Face token", "hf_|api_org_",
               r"(?:hf_|api_org_)[A-Za-z0-9]{30,200}",
               ("hf_{34}", "api_org_{34}")),
    SecretForm("API key (sk-...)", "sk-",  # OpenAI, Anthropic, OpenRouter, DeepSeek, ...
               r"sk-[A-Za-z0-9_\-]{18,300}",
               ("sk-{48}", "sk-{32 hex}", "sk-proj-{74}_{20}-{30}", "sk-ant-api03-{60}-{30}-{3}", "sk-or-v1-{64 hex}"),
               looks_generated),
    SecretForm("xAI key", "xai-",
               r"xai-[A-Za-z0-9]{20,200}",
               ("xai-{80}",)),
    SecretForm("Groq key", "gsk_",
               r"gsk_[A-Za-z0-9]{20,200}",
               ("gsk_{52}",)),
    SecretForm("Perplexity key", "pplx-",
               r"pplx-[A-Za-z0-9]{20,200}",
               ("pplx-{48}", "pplx-{48 hex}")),
    SecretForm("Tavily key", "tvly-",
               r"tvly-[A-Za-z0-9_\-]{16,200}",
               ("tvly-{32}", "tvly-dev-{32}"),
               looks_generated),
    SecretForm("NVIDIA key", "nvapi-",
               r"nvapi-[A-Za-z0-9_\-]{20,200}",
               ("nvapi-{64}", "nvapi-{30}_{20}-{12}"),
               looks_generated),
    SecretForm("Replicate token", "r8_",
               r"r8_[A-Za-z0-9]{20,200}",
               ("r8_{37}",)),
    SecretForm("LangSmith key", "lsv2_|ls__",
               r"(?:lsv2_(?:[a-z]{2}_)?|ls__)[A-Za-z0-9_]{20,200}",
               ("lsv2_pt_{32 hex}_{10 hex}", "lsv2_sk_{32 hex}_{10 hex}", "lsv2_{40}"),
               looks_generated),
    SecretForm("W&B key", "wandb_v1_|wandb login ",
               r"(?:wandb_v1_[A-Za-z0-9_\-]{20,200}|wandb login (?:--relogin )?[0-9a-f]{40}(?![0-9a-f]))",
               ("wandb_v1_{40}_{36}", "wandb login {40 hex}"),
               looks_generated),
    SecretForm("key of a search or model service",
               "jina_|fc-|e2b_|csk-|pcsk_|tgp_v1_|fw_|apify_api_|bb_live_|exa_|dapi",
               r"(?:jina_|csk-|pcsk_|tgp_v1_|fw_|apify_api_|bb_live_|exa_)[A-Za-z0-9_\-]{24,200}"
               r"|(?:fc-|dapi)[0-9a-f]{32}(?![A-Za-z0-9])|e2b_[0-9a-f]{40}(?![A-Za-z0-9])",
               ("jina_{60}", "fc-{32 hex}", "e2b_{40 hex}", "csk-{48}", "pcsk_{60}", "tgp_v1_{40}", "dapi{32 hex}"),
               looks_generated),
    # ------------------------------------------------------------ code and packages
    SecretForm("GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_|github_pat_",
               r"(?:gh[pousr]_[A-Za-z0-9]{30,300}|github_pat_[A-Za-z0-9_]{40,300})",
               ("ghp_{36}", "gho_{36}", "ghs_{36}", "github_pat_{22}_{59}")),
    SecretForm("GitLab token", "glpat-|gldt-|glrt-|glptt-|glcbt-|glsoat-|gloas-",
               r"gl(?:pat|dt|rt|ptt|cbt|soat|oas)-[A-Za-z0-9_\-.]{20,200}",
               ("glpat-{20}", "gldt-{20}", "glrt-{20}")),
    SecretForm("npm token", "npm_|_authtoken",
               r"(?:npm_[A-Za-z0-9]{30,200}|_authToken[ \t]{0,4}=[ \t]{0,4}(?P<secret>[^\s]{8,300}))",
               ("npm_{36}", "//registry.npmjs.org/:_authToken={12}"),
               starts_a_word=False),
    SecretForm("PyPI token", "pypi-",
               r"pypi-[A-Za-z0-9_\-]{16,300}",
               ("pypi-AgEIcHlwaS5vcmc{100}",),
               looks_generated),
    SecretForm("Docker token", "dckr_pat_|dckr_oat_",
               r"dckr_[po]at_[A-Za-z0-9_\-]{20,200}",
               ("dckr_pat_{27}", "dckr_oat_{27}")),
    # ------------------------------------------------------------ clouds
    SecretForm("AWS access key", "akia|asia|abia|acca",
               r"A(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}(?![A-Za-z0-9])",
               ("AKIA{16 upper}", "ASIA{16 upper}")),
    SecretForm("Google API key", "aiza",
               r"AIza[0-9A-Za-z_\-]{35}(?![0-9A-Za-z])",
               ("AIza{35}",)),
    SecretForm("Google OAuth token", "ya29.|gocspx-",
               r"(?:ya29\.[A-Za-z0-9_\-]{20,400}|GOCSPX-[A-Za-z0-9_\-]{20,60})",
               ("ya29.{60}", "GOCSPX-{28}"),
               looks_generated),
    SecretForm("Azure key", "accountkey=|sharedaccesskey=",
               r"(?i:AccountKey|SharedAccessKey)=(?P<secret>[A-Za-z0-9+/]{30,200}={0,2})",
               ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={86}==;EndpointSuffix=core.windows.net",
                "Endpoint=sb://a.servicebus.windows.net/;SharedAccessKeyName=root;SharedAccessKey={43}=")),
    SecretForm("Azure SAS signature", "sig=",
               r"(?i:sig)=(?P<secret>[A-Za-z0-9%+/_\-]{30,200}={0,2})",
               ("https://a.blob.core.windows.net/c?sv=2024-11-04&se=2026-01-01&sr=c&sp=r&sig={43}%3D",),
               looks_generated),
    SecretForm("DigitalOcean token", "dop_v1_|doo_v1_|dor_v1_",
               r"do[por]_v1_[A-Za-z0-9]{20,200}",
               ("dop_v1_{64 hex}",)),
    SecretForm("Vault token", "hvs.|hvb.|hvr.",
               r"hv[sbr]\.[A-Za-z0-9_\-]{20,400}",
               ("hvs.{24}", "hvs.CAESI{50}_{40}")),
    # ------------------------------------------------------------ messages and payments
    SecretForm("Slack token", "xoxa-|xoxb-|xoxe-|xoxo-|xoxp-|xoxr-|xoxs-|xoxc-|xoxd-|xapp-",
               r"(?:xox[abeoprscd]|xapp)-[0-9A-Za-z\-]{10,300}",
               ("xoxb-{12 digits}-{13 digits}-{24}", "xoxa-{12 digits}-{24}", "xoxp-{12 digits}-{32 hex}",
                "xoxr-{12 digits}-{24}", "xapp-1-A{10 upper}-{13 digits}-{64 hex}")),
    SecretForm("Slack webhook", "hooks.slack.com/",
               r"hooks\.slack\.com/(?:services|workflows|triggers)/(?P<secret>[A-Za-z0-9_/\-]{20,200})",
               ("https://hooks.slack.com/services/T{10 upper}/B{10 upper}/{24}",)),
    SecretForm("Discord webhook", "discord.com/api/|discordapp.com/api/",
               r"discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/\d{15,25}/(?P<secret>[A-Za-z0-9_\-]{30,200})",
               ("https://discord.com/api/webhooks/{18 digits}/{68}",
                "https://discordapp.com/api/v10/webhooks/{19 digits}/{30}_{30}-{6}")),
    SecretForm("SendGrid key", "sg.",
               r"SG\.[A-Za-z0-9_\-]{16,100}+\.[A-Za-z0-9_\-]{16,100}",
               ("SG.{22}.{43}",),
               looks_generated),
    SecretForm("Stripe key", "sk_live_|sk_test_|rk_live_|rk_test_|whsec_",
               r"(?:[sr]k_(?:live|test)_[0-9A-Za-z]{16,300}|whsec_[A-Za-z0-9+/]{24,200})",
               ("sk_live_{24}", "sk_test_{24}", "rk_live_{24}", "rk_test_{99}", "whsec_{32}")),
    # ------------------------------------------------------------ whatever the service
    SecretForm("JSON web token", "eyj",
               r"eyJ[A-Za-z0-9_\-]{10,400}+\.eyJ[A-Za-z0-9_\-]{10,4000}+\.[A-Za-z0-9_\-]{10}",
               ("eyJ{33}.eyJ{60}.{43}",)),
    SecretForm("bearer token", "bearer |bearer%20|bearer+",
               r"(?i:bearer)(?:[ \t]{1,4}|%20|\+)(?P<secret>[A-Za-z0-9._~+/\-]{16,2000}={0,2})",
               ("Authorization: Bearer {24}", "authorization=bearer {40 hex}", "curl -H 'X: Bearer {30}.{30}'"),
               looks_generated),
    SecretForm("user and password (Basic)", "basic ",
               r"(?i:basic)[ \t]{1,4}(?P<secret>[A-Za-z0-9+/_\-]{8,500}={0,2})",
               ("Authorization: Basic {user and password}",),
               _is_user_and_password),
    SecretForm("password in a URL", "://",
               r"://[^\s/:@\"'<>\\?#]{0,100}+:(?P<secret>[^\s/@\"'<>\\]{3,200})@[\w\[]",
               ("postgres://me:{12}@db.internal:5432/x", "redis://:{12}@cache:6379", "https://me:{9 lower}@a.org/b"),
               starts_a_word=False),
    SecretForm("password of a connection", "password=|pwd=",
               r"(?i:(?:(?<=;)|(?<=;[ ])|(?<=\w[ ]))(?:password|pwd)=(?P<secret>[^;\s\"',()<>\\]{6,200}))",
               ("Server=tcp:a.net,1433;Database=b;User ID=c;Password={12};Encrypt=True", "Server=a;Uid=b;Pwd={12};",
                "host=a port=5432 user=b password={12} dbname=c"),
               starts_a_word=False),
    SecretForm("password", "password|passwd|passphrase",
               r"(?i:pass(?:word|wd|phrase))[\"'\\]{0,4}[ \t]{0,4}[:=][ \t]{0,4}[\"'\\]{0,4}"
               r"(?P<secret>(?=[^\s\"',;(){}\\]{0,100}[0-9!@#%^&])[^\s\"',;(){}\\]{6,200}+)(?!\()",
               ("password: {8}7!", "DB_PASSWORD={12}7", "passphrase = {8}-7", '{"a": "b", "password": "{12}7"}'),
               starts_a_word=False),
    SecretForm("password on a line of its own", "password|passwd|passphrase",
               r"(?i:(?<!\w)(?<!\w[ ])pass(?:word|wd|phrase))"
               r"(?:[ \t]{0,4}:[ \t]{0,4}[\"']?|=[\"']?|[ \t]{1,4}=[ \t]{0,4}[\"'])"
               r"(?P<secret>[A-Za-z_\-.~+/|?]{8,200})[\"']?[ \t]{0,4}(?=\r?\n|\Z)",
               ("password: {12 lower}", "passphrase='{5 lower}-{5 lower}'"),
               starts_a_word=False),
    SecretForm("private key", "-----begin |---- begin |putty-user-key-file-|age-secret-key-1",
               r"(?:-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
               r"|---- BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY ----"
               r"|PuTTY-User-Key-File-\d: |AGE-SECRET-KEY-1[A-Z0-9]{50})",
               ("-----BEGIN {pem}PRIVATE KEY-----", "-----BEGIN PGP {pem}PRIVATE KEY BLOCK-----",
                "---- BEGIN SSH2 ENCRYPTED {pem}PRIVATE KEY ----", "PuTTY-User-Key-File-{1 digits}: ssh-ed25519",
                "AGE-SECRET-KEY-1{58 upper}"),
               starts_a_word=False),
    SecretForm("token of another service",
               "shpat_|shpca_|shppa_|shpss_|figd_|ntn_|pmak-|lin_api_|glsa_|sntrys_|rubygems_|pscale_|dp.pt.|nrak-|atatt3",
               r"(?:shp(?:at|ca|pa|ss)_|figd_|ntn_|PMAK-|lin_api_|glsa_|sntrys_|rubygems_|pscale_[a-z]{2,5}_|dp\.pt\."
               r"|NRAK-|ATATT3)[A-Za-z0-9_\-=]{24,400}",
               ("shpat_{32 hex}", "figd_{40}", "ntn_{46}", "PMAK-{24 hex}-{34 hex}", "lin_api_{40}",
                "glsa_{32}_{8 hex}", "pscale_pw_{43}", "dp.pt.{43}", "NRAK-{27 upper}", "ATATT3{180}"),
               looks_generated),
)
# fmt: on


class FormMatch(NamedTuple):
    """A place in a text that has the form of a secret."""

    start: int
    text: str
    form: SecretForm


class _Compiled(NamedTuple):
    form: SecretForm
    beginnings: list[str]
    pattern: re.Pattern[str]


_COMPILED = [
    _Compiled(
        form, form.beginnings.split("|"), re.compile(_STARTS_A_WORD * form.starts_a_word + f"(?:{form.pattern})")
    )
    for form in FORMS
]


def find_forms(text: str) -> Iterator[FormMatch]:
    """Every place in a text that has the form of a secret, and is no placeholder."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a letter whose lower case is two characters
        lowered = text.translate(_UPPER_TO_LOWER)
    for form, beginnings, pattern in _COMPILED:
        for beginning in beginnings:
            position = lowered.find(beginning)
            while position >= 0:
                match = pattern.match(text, position)
                if match and _is_secret(match, form):
                    yield FormMatch(position, match[0], form)
                end = match.end() if match else position
                position = lowered.find(beginning, max(end, position + len(beginning)))


def _is_secret(match: re.Match[str], form: SecretForm) -> bool:
    secret = match[0]
    if "secret" in match.re.groupindex:
        secret = match["secret"] or match[0]
    return form.accepts(secret) and not is_placeholder(secret)
