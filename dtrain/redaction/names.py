"""Decides by its name whether a setting, a variable or a field of a text holds a secret.

A name is read as words, whatever its case and separators: ``SessionToken``, ``session-token`` and ``SESSION_TOKEN`` are
the same two. So ``bypass`` holds no ``pass``, and ``num_kv_heads`` and ``key_dim`` no key.
"""

from __future__ import annotations

import itertools
import re
from enum import IntEnum
from functools import lru_cache


class Secrecy(IntEnum):
    """Whether a value is a secret, judged by its name alone.

    Attributes:
        NONE: nothing.
        VAGUE: a string that looks random is a secret, such as that of ``key``.
        LIKELY: text is a secret, a number is not, such as those of ``token`` and ``tokens``.
        CERTAIN: every value but null, true and false is a secret.
    """

    NONE = 0
    VAGUE = 1
    LIKELY = 2
    CERTAIN = 3


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_CERTAIN = re.compile(
    r"passw|passphrase|passcode|passkey|secret|credential|webhook|bearer|cookie|jwt|pwd|^authorization$"
)
_KEYS = "api access private auth encryption signing secret account ssh aws gpg pgp license client host deploy"
_COMPOUND_KEY = re.compile(rf"(?:{_KEYS.replace(' ', '|')})keys?")
_AFTER_PASS = _words("word words phrase phrases code codes key keys")
_AUTH = _words("auth oauth authentication")
_LAST = _words("private cred creds")
# words before "key" with which it names no credential
_BEFORE_KEY = _words(
    "sort primary foreign public cache text label image input output target dict state query feature column index "
    "group join partition batch data dataset metric loss map lookup step mask pad padding bias attention attn rng "
    "prng random field name dim value config model tensor param weight no with use num per head kv"
)
_BEFORE_TOKEN = _words(
    "bos eos pad unk mask cls sep special additional added start end stop begin final image text audio video num max "
    "min sample samples new per total vocab extra next last first prompt separator padding unknown prefix suffix "
    "newline control input output drop skip word sub class register memory prediction ignore global latent null blank "
    "context dist distill empty space byte of"
)
_BEFORE_PASS = _words(
    "forward backward single one two three first second multi low high band all full each per num dry"
)
_TOKEN_COMPOUNDS = _words("subtoken subtokens detoken")
_PASS_COMPOUNDS = _words("bypass compass encompass trespass surpass overpass underpass")


@lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """Returns what ``name`` says of its value; of a dotted name, what its most secret part says."""
    return max((_of_part(part) for part in name.split(".")), default=Secrecy.NONE)


def _of_part(part: str) -> Secrecy:
    words = [word.lower() for word in _WORD.findall(part)]
    if not words:
        return Secrecy.NONE
    chunks = [chunk.lower() for chunk in re.findall(r"[A-Za-z]+", part)]  # APIkey is one, and no two words
    pairs = [*itertools.pairwise(words)]
    if (
        any(map(_CERTAIN.search, words))
        or any(_COMPOUND_KEY.fullmatch(text) for text in [*words, *chunks, *map("".join, pairs)])
        or any(first == "pass" and second in _AFTER_PASS for first, second in pairs)
    ):
        return Secrecy.CERTAIN
    before, last = words[-2] if pairs else "", words[-1]
    if not _AUTH.isdisjoint(words) or last in _LAST:
        return Secrecy.LIKELY
    if last in ("token", "tokens"):
        return Secrecy.NONE if before in _BEFORE_TOKEN else Secrecy.LIKELY
    if last.endswith(("token", "tokens")):  # hftoken
        return Secrecy.NONE if last in _TOKEN_COMPOUNDS else Secrecy.LIKELY
    if last == "pass":
        return Secrecy.NONE if before in _BEFORE_PASS else Secrecy.LIKELY
    if last.endswith("pass"):  # dbpass; lowpass is low_pass
        is_open = last in _PASS_COMPOUNDS or last.removesuffix("pass") in _BEFORE_PASS
        return Secrecy.NONE if is_open else Secrecy.LIKELY
    if last == "key":
        return Secrecy.VAGUE if not before else Secrecy.NONE if before in _BEFORE_KEY else Secrecy.LIKELY
    return Secrecy.NONE
