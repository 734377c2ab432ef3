"""Removal of secrets from a text: values of secret variables, logins, and strings that look like tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote

_IN_NAMES = re.compile(
    r"TOKEN|KEY|SECRET|PASS|JWT|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|WEBHOOK|BEARER|OTP|CERT|DSN|CONN(ECTION)?_?STR"
    r"|(^|_)(PAT|PWD|PW|PSK|SAS|PIN|SALT|SESSION|SID|MNEMONIC|SEED_PHRASE|LICENSE)(_|$)",
    re.IGNORECASE,
)
_NO_SECRETS = {"PWD", "OLDPWD", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS", "DESKTOP_SESSION"}
_USUAL = {"true", "false", "none", "null", "yes", "no", "on", "off", "auto", "default"}
_SHORT, _SHORTEST = 6, 3  # characters: what is shorter is sought as a word, and not at all
_WORDS = (
    r"(?:pass(?:word|wd|phrase)?|pwd|(?:[a-z]+[_-])?(?:token|secret|pat|sig|signature|credential)"
    r"|(?:api|access|account|shared|private|secret)[_-]?key)"
)
_SHAPES = (
    # Logins in addresses, up to the last @: passwords have some, and slashes.
    (re.compile(r"""(?<=://)(?:[^\s/?#"']*|[^\s/:@"']*:[^\s"']*)@"""), "(login)@"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL), "(private key)"),
    (re.compile(r"\b(Bearer|Basic|Digest) +[\w+/.=~-]{6,}", re.IGNORECASE), r"\1 (hidden)"),
    (re.compile(rf"""(?<![a-z])({_WORDS})(["']?\s*[=:]\s*["']?)[^\s"'&,;)]{{3,}}""", re.IGNORECASE), r"\1\2(hidden)"),
    # As GitHub, GitLab, Hugging Face, OpenAI, Slack, AWS, Google, npm, PyPI and JWT write them.
    (
        re.compile(
            r"\b(?:gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|hf_\w{8,}|sk-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|npm_\w{8,}|pypi-[\w-]{8,}|eyJ[\w-]+\.[\w-]+\.[\w-]*)"
        ),
        "(token)",
    ),
)


def is_secret(name: str) -> bool:
    """True if the variable of this name may hold a secret."""
    return name not in _NO_SECRETS and _IN_NAMES.search(name) is not None


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without what the environment keeps secret, without logins and tokens, and without the home."""
    forms = ((form, name) for name, value in environ.items() if is_secret(name) for form in _forms(value))
    found = {form: name for form, name in forms if form in text}
    if found:
        # Longest first, and in one pass: one may be the beginning of another, or stand in the name of another.
        either = "|".join(map(_pattern, sorted(found, key=len, reverse=True)))
        text = re.sub(either, lambda match: f"({found[match[0]]})", text)
    for pattern, instead in _SHAPES:
        text = pattern.sub(instead, text)
    home = environ.get("HOME", "")
    return re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text) if len(home) > 1 else text


def _forms(value: str) -> Iterator[str]:
    """Yield how a value may stand in a text: whole, quoted, and line by line, as a log shows it."""
    quoted = quote(value, safe=""), value.encode("unicode_escape").decode()
    for form in map(str.strip, (value, *quoted, *value.split("\n"))):
        if len(form) >= _SHORTEST and form.lower() not in _USUAL and not (form.isdecimal() and len(form) < _SHORT):
            yield form


def _pattern(form: str) -> str:
    # A short one stands in many words, which would become unreadable.
    return re.escape(form) if len(form) >= _SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
