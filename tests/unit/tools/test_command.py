"""The command line of a report."""

from __future__ import annotations

import pytest

from dtrain.tools.command import command_text

WORDS = {
    "model.args.api_key=abc": "'model.args.api_key=***'",
    "+model.args.token=abc": "'+model.args.token=***'",
    "model.args.secrets.name=abc": "'model.args.secrets.name=***'",
    "model.args={a: 1, hf_token: abc}": "'model.args=***'",
    "model.args={a:1,password:abc}": "'model.args=***'",
    "data.url=https://me:abc@example.org/x": "'data.url=https://***@example.org/x'",
    "model.args.max_tokens=4096": "model.args.max_tokens=4096",
    "formats=[bf16,fp8]": "'formats=[bf16,fp8]'",
    "precision.rules={head: fp32}": "'precision.rules={head: fp32}'",
    "-m": "-m",
}


@pytest.mark.parametrize("word", WORDS)
def test_secrets_are_blanked_and_the_rest_can_be_pasted(word: str) -> None:
    assert command_text("probe", [word, "steps=20"]) == f"dtrain probe {WORDS[word]} steps=20"
