"""Secrets of many kinds, planted in a run's settings, and the model factory that takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.models import transformer

ENVIRONMENT = {
    "WANDB_API_KEY": "c4nary-wandb-0123456789abcdef0123456789abcdef",
    "MY_SERVICE_TOKEN": "c4nary service/token+01",
    "DB_PWD": "c4nary-pin-7",
    "DEPLOY_AUTH": "c4nary-auth-99",
    "SIGNING_KEY": "4815162342",
}
_ENCODED = "c4nary%20service%2Ftoken%2B01"
_JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjNG5hcnkifQ.c4nary_jwt-sig"

# name -> the setting, and what of it must not leave; tests/unit/redaction has all names and forms
ARGS: dict[str, tuple[Any, str]] = {
    "api_key": ("c4nary-api-key", "c4nary-api-key"),
    "pwd": ("c4nary-pwd", "c4nary-pwd"),
    "DB-Password": (948374651, "948374651"),
    "credentials": ({"user": "me", "list": ["c4nary-nested"]}, "c4nary-nested"),
    "from_env": ("${oc.env:WANDB_API_KEY}", ENVIRONMENT["WANDB_API_KEY"]),
    "env_inside": ("https://x.org/${oc.env:MY_SERVICE_TOKEN}/y", ENVIRONMENT["MY_SERVICE_TOKEN"]),
    "env_encoded": (f"https://x.org/{_ENCODED}", _ENCODED),
    "env_listed": (["a", "${oc.env:DB_PWD}"], ENVIRONMENT["DB_PWD"]),
    "env_as_key": ({"c4nary-auth-99": 1}, "c4nary-auth-99"),
    "hub": ("load with hf_C4naryC4naryC4nary, please", "hf_C4naryC4naryC4nary"),
    "text": ("connect with password=c4nary-text1 now", "c4nary-text1"),
    "url": ("https://x.org/file?token=c4nary-url1&page=2", "c4nary-url1"),
    "database": ("postgres://me:c4nary-url4@db.x.org/a", "c4nary-url4"),
    "web": (f"id {_JWT} end", _JWT),
    "pem": ("-----BEGIN RSA PRIVATE KEY-----\nc4nary-pem\n-----END RSA PRIVATE KEY-----", "c4nary-pem"),
    "again": ("welcome, c4nary-api-key", "c4nary-api-key"),
}
READABLE = {"num_kv_heads": 2, "tokens": 4096, "pad_token": "<pad>", "url_of_docs": "https://x.org/docs?page=2"}
WORDS = {  # on the command line, which wandb would record
    "tracker.run_name=night-hf_C4naryRunName01": "hf_C4naryRunName01",
    "tracker.tags=[a,ghp_C4naryTag000001]": "ghp_C4naryTag000001",
    "tracker.entity=team-password=c4nary-entity": "c4nary-entity",
    "+model.args.access_token=c4nary-word": "c4nary-word",
}


def secrets() -> dict[str, str]:
    """Returns what must be found nowhere, by its kind."""
    planted = {name: secret for name, (_, secret) in ARGS.items()}
    return planted | {word.partition("=")[0].lstrip("+"): secret for word, secret in WORDS.items()}


def leaks(folder: Path, *texts: str) -> list[str]:
    """Returns each secret that a file below ``folder``, its path, or one of ``texts`` holds, with the place."""
    places = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    places |= {"paths": "\n".join(places).encode(), "console": "\n".join(texts).encode()}
    return [
        f"{kind} in {place}"
        for kind, secret in secrets().items()
        for place, text in places.items()
        if secret.encode() in text
    ]


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Returns the default model, whose first backward overflows, so that the step is skipped."""
    model = transformer.build(replace(config, args={}), vocab_size)
    calls = []

    def overflow_once(grad: Tensor) -> Tensor:
        calls.append(1)
        return torch.full_like(grad, torch.inf) if len(calls) == 1 else grad

    next(model.parameters()).register_hook(overflow_once)
    return model
