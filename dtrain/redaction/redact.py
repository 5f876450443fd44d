"""Blanks secrets in everything that a run stores, sends or prints: settings, reports, messages, logs.

A secret is found by its name (``dtrain.redaction.names``), by its form (a token of a known service, a password in a
URL), or because it is the value of an environment variable with a secret name. Only the secret is replaced, by
``MASK``, so that what is around it stays readable. What is blanked once stays as it is when it is blanked again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dtrain.redaction.names import Secrecy, secrecy

MASK = "***"

_MIN_LENGTH = 6  # of a variable's value: `1`, `true` and `auto` occur everywhere
_MIN_REMEMBERED = 8  # of a value under a secret name, which is then blanked wherever it occurs
_PLACES = ("PWD", "OLDPWD")  # variables with folders

# an alternative for each issuer; a digit or a capital tells hf_x8Kq... from a name such as hf_tokenizer
_TOKENS = re.compile(
    r"\b(?:"
    r"hf_(?=[A-Za-z0-9]*[0-9A-Z])[A-Za-z0-9]{6,}[\w-]*"
    r"|A(?:KIA|SIA|BIA|CCA)[0-9A-Z][0-9A-Z_-]{5,}"
    r"|gh[pousr]_[A-Za-z0-9]{6,}\w*|github_pat_\w{6,}|gl(?:pat|ptt|dt|rt)-[\w-]{6,}"
    r"|xox[a-z]-[\w-]{6,}|xapp-[\w-]{6,}"
    r"|sk-(?=[\w-]*[0-9A-Z])[\w-]{8,}|[srp]k_(?:live|test)_\w{6,}"
    r"|AIza[\w-]{10,}|ya29\.[\w-]{6,}|npm_(?=\w*[0-9A-Z])\w{10,}|pypi-[\w-]{16,}|wandb_v\d+_\w{6,}|dapi[0-9a-f]{16,}"
    r"|SG\.[\w-]{6,}\.[\w-]{6,}"
    r"|eyJ[\w-]{6,}(?:\.[\w-]*){1,4}"  # a JSON web token
    r")"
)
_PATTERNS = (
    (re.compile(r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL), rf"\1{MASK}"),
    (_TOKENS, MASK),
    (re.compile(r"\b(bearer\s+)(?!\*)[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"\b(hooks\.slack(?:-gov)?\.com/|discord(?:app)?\.com/api/(?:v\d+/)?webhooks/)[\w/-]+"), rf"\1{MASK}"),
    (re.compile(r"(?<=://)[^/\s\"'<>]+(?=@)"), MASK),  # the user too: of a token in a URL it is the secret
    (re.compile(r"(?<![\w.+/-])([\w.+-]{1,64}:)[^\s:@/\"']{3,}(?=@[\w-]+\.[\w-])"), rf"\1{MASK}"),
)
_NAME = re.compile(
    r"(?<![\w.-])(?P<option>--?)?"
    r"(?=[\w.-]{0,199}?(?i:pass|pwd|secret|cred|cookie|jwt|bearer|webhook|key|auth|token|private|sig|code|sid))"
    r"(?P<name>[A-Za-z_][\w.-]{0,199})"
    r"(?:(?P<separator>\\?[\"']?\s{0,3}[=:][=>]?\s{0,3})|(?(option)\s+|(?!)))"
)


def _balanced(opening: str, closing: str, inside: str) -> str:
    """Returns a pattern of a pair of brackets with up to five pairs of the same kind inside each other."""
    pattern = rf"{opening}{inside}*{closing}"
    for _ in range(5):
        pattern = rf"{opening}{inside}*(?:{pattern}{inside}*)*{closing}"
    return pattern


_VALUE = re.compile(
    "|".join(
        (
            r"\\\"(?:[^\"\\]|\\[^\"])*\\\"",  # JSON inside of a text of JSON
            r"(?P<triple>\"{3}|'{3}).*?(?P=triple)",
            r"\"(?:[^\"\\]|\\.)*\"",
            r"'(?:[^'\\]|\\.)*'",
            _balanced(r"\{", r"\}", r"[^{}]"),
            _balanced(r"\[", r"\]", r"[^\[\]]"),
            _balanced(r"\(", r"\)", r"[^()\n]"),
            r"<[^<>\n]*>",
            r"(?!\\\")[^\s,;&\"'{}\[\]()<>]+",
            r"\\?[\"'{\[(<][^\s,;&]+",  # not closed
        )
    ),
    re.DOTALL,
)
_REST_OF_LINE = re.compile(r"[^\n\"']+")
_HEADER = re.compile(r"authorization|cookie", re.IGNORECASE)
_SIGNATURE = re.compile(r"(?:^|[_-])sig(?:nature)?$", re.IGNORECASE)
_IN_QUERIES = ("key", "code", "sid")
_NUMBER = r"[-+]?[\d.]+(?:e[-+]?\d+)?%?"
_NUMBERS = re.compile(rf"[\[(]*{_NUMBER}(?:[\[\](), ]+{_NUMBER})*[\])]*", re.IGNORECASE)  # one, or a list
_RANDOM = re.compile(r"(?=.*\d)[\w+/=-]{8,}")
_PAIR = re.compile(r"[^\s:/]+:(?!\d+$)[^\s/].*")  # user:password, no host:port, no URL
_NAMES_SECRET = re.compile(r"(?:tokens?|key|pass|private|creds?)[^a-z]*$", re.IGNORECASE)
_HARMLESS = ("", "true", "false", "null", "none", "str", "int", "float", "bool", "bytes")

_remembered: set[str] = set()


def redact(value: Any) -> Any:
    """Returns a copy of settings (plain JSON) without secrets: by their keys, and as ``redact_values``.

    A value of 8 characters or more under a secret key is remembered, and blanked wherever else it occurs, also in later
    messages, if the key is certain (``Secrecy``) or the value looks random: letters and digits without spaces.
    """
    _remembered.update(_named_secrets(value))
    return _Redactor().tree(value, by_name=True)


def redact_values(value: Any) -> Any:
    """Returns a copy of a record (plain JSON) whose texts are without secrets; its keys are names of dtrain's own."""
    return _Redactor().tree(value, by_name=False)


def redact_text(text: str) -> str:
    """Returns ``text`` without secrets."""
    return _Redactor().text(text)


def redact_file(path: Path) -> None:
    """Blanks the secrets in a log that other processes have written."""
    before = path.read_text(encoding="utf-8", errors="replace")
    after = redact_text(before)
    if after != before:
        path.write_text(after, encoding="utf-8")


def equal_but_for_secrets(a: Any, b: Any) -> bool:
    """Returns whether two redacted values may be the same: ``MASK`` stands for any text."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_but_for_secrets, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_but_for_secrets(a[key], b[key]) for key in a)
    for masked, other in ((a, b), (b, a)):
        if masked == MASK:
            return other is not None
        if isinstance(masked, str) and MASK in masked and isinstance(other, str):
            pattern = ".*".join(map(re.escape, masked.split(MASK)))
            return re.fullmatch(pattern, other, re.DOTALL) is not None
    return bool(a == b)


def has_secret_name(text: str) -> bool:
    """Returns whether a name before a colon or an equals sign in ``text`` is that of a secret."""
    return any(secrecy(found["name"]) > Secrecy.VAGUE for found in _NAME.finditer(text))


def is_secret(name: str, value: Any) -> bool:
    """Returns whether the name and the form of a setting show a secret."""
    level = secrecy(name)
    if level == Secrecy.NONE or value is None or isinstance(value, bool):
        return False
    if isinstance(value, dict | list | tuple):
        return level == Secrecy.CERTAIN or (level == Secrecy.LIKELY and any(True for _ in _texts(value)))
    text = str(value)
    if level == Secrecy.CERTAIN:
        return text != ""
    if not isinstance(value, str) or text == "":
        return False
    return level == Secrecy.LIKELY or _RANDOM.fullmatch(text) is not None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _named_secrets(value: Any, name: str = "") -> Iterator[str]:
    """Yields the texts under secret names that are long enough to be blanked wherever they occur."""
    if is_secret(name, value):
        is_certain = secrecy(name) == Secrecy.CERTAIN
        for text in _texts(value):
            if MASK not in text and len(text) >= _MIN_REMEMBERED and (is_certain or _RANDOM.fullmatch(text)):
                yield text
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _named_secrets(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named_secrets(item)


def _environment() -> Iterator[str]:
    """Yields the values of the environment variables whose names are those of secrets, as they may stand in a text."""
    for name, variable in os.environ.items():
        value = variable.strip()
        if len(value) < _MIN_LENGTH or not _is_secret_variable(name, value) or name in _PLACES:
            continue
        if not os.path.isabs(value) or not os.path.exists(value):  # a file with a secret, or a socket, is none
            yield value


def _is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable is a secret; plain words and counts are not, since a secret is blanked wherever it occurs."""
    level = secrecy(name)
    if level in (Secrecy.NONE, Secrecy.CERTAIN):
        return level == Secrecy.CERTAIN
    if _NUMBERS.fullmatch(value):
        return False
    looks_random = _RANDOM.fullmatch(value) is not None
    if level == Secrecy.VAGUE or looks_random:
        return looks_random
    # of AUTH_MODE, `default` is none
    return _NAMES_SECRET.search(name) is not None or _PAIR.fullmatch(value) is not None


class _Redactor:
    """Blanks with the environment as it is now."""

    def __init__(self) -> None:
        known = {*_environment(), *_remembered}
        self._known = {form for text in known for form in (text, quote(text, safe=""), json.dumps(text)[1:-1])}
        longest_first = sorted(self._known, key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def tree(self, value: Any, name: str = "", *, by_name: bool) -> Any:
        if by_name and is_secret(name, value):
            return MASK
        if isinstance(value, dict):
            return {
                self.text(key) if isinstance(key, str) else key: self.tree(item, str(key), by_name=by_name)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.tree(item, by_name=by_name) for item in value]
        if isinstance(value, str):
            return self.text(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return MASK if is_number and self._known and str(value) in self._known else value

    def text(self, text: str) -> str:
        if self._literal is not None:
            text = self._literal.sub(MASK, text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return "".join(_without_named_values(text))


def _without_named_values(text: str) -> Iterator[str]:
    """Yields ``text`` in parts, with the values of secret names blanked, as in ``password=x``, ``"token": "x"``."""
    end = 0
    for found in _NAME.finditer(text):
        value = _named_value(text, found) if found.start() >= end else None  # else inside a value that was blanked
        if value is not None:
            yield text[end : value[0]]
            yield MASK
            end = value[1]
    yield text[end:]


def _named_value(text: str, found: re.Match[str]) -> tuple[int, int] | None:
    """Returns where the secret after a name begins and ends, without its quotes; None: there is none."""
    name, separator = found["name"], found["separator"] or ""
    in_query = separator == "=" and text[: found.start()].endswith(("?", "&"))
    level = _secrecy_in_text(name, in_query=in_query)
    if level == Secrecy.NONE:
        return None
    value = _REST_OF_LINE.match(text, found.end()) if _HEADER.search(name) and ":" in separator else None
    value = value or _VALUE.match(text, found.end())
    if value is None:
        return None
    bare = value.group().strip("\\\"'()<> ")
    if bare.lower() in _HARMLESS or bare == MASK:
        return None
    if level < Secrecy.CERTAIN and not in_query:
        must_look_random = level == Secrecy.VAGUE or _is_prose(text, found.start(), separator, value.end())
        if _NUMBERS.fullmatch(bare) or (must_look_random and not _RANDOM.fullmatch(bare)):
            return None
    start = value.start() + value.group().find(bare)
    return start, start + len(bare)


def _is_prose(text: str, start: int, separator: str, end: int) -> bool:
    """Returns whether a colon is that of a sentence, as in ``login: auth: failed``, not of an entry of YAML or JSON."""
    if separator.strip() != ":":
        return False
    before = text[max(0, start - 80) : start].rstrip(" -")
    return not (before.endswith(("{", ",", "\n")) or not before) or text[end : end + 1] not in ("", "\n", ",", "}")


def _secrecy_in_text(name: str, *, in_query: bool) -> Secrecy:
    if _SIGNATURE.search(name):
        return Secrecy.LIKELY if in_query else Secrecy.VAGUE
    return Secrecy.LIKELY if in_query and name.lower() in _IN_QUERIES else secrecy(name)
