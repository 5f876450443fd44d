"""What is blanked, what stays readable, and that a blanked text stays as it is."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest

from dtrain.config.commands import PRIMARIES
from dtrain.config.data import TextDataConfig
from dtrain.config.dump import config_to_dict
from dtrain.config.schema import GROUP_OPTIONS, RunConfig
from dtrain.redaction.names import Secrecy, secrecy
from dtrain.redaction.redact import equal_but_for_secrets, redact, redact_text, redact_values

PEM_END = "-----END PRIVATE KEY-----"
SECRET_NAMES = (
    "password PASSWORD dbPassword db_passwd user.password passphrase pass_phrase PassWord pwd MYSQL_PWD pass "
    "db-pass secret client_secret token hf_token HF_TOKEN SessionToken session-token hftoken api_key apikey "
    "apiKey APIKey APIkey X-API-Key my_key private private_key privateKey cookie session_cookie jwt JWTValue "
    "credential credentials aws_creds auth basicAuth authorization Authorization bearer webhook_url "
    "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AccountKey license_key encryption-keys ssh_key tokens "
    "dbpass smtppass MYPASS "
)
OPEN_NAMES = (
    "num_kv_heads key_dim max_tokens sample_tokens num_tokens tokens_per_s tokenizer token_embedding "
    "token_type_ids tie_embeddings bypass bypass_words pass_through forward_pass low_pass compass passes author "
    "authors keep_gathered keyed_by keys batch_keys sort_key state_dict_key cache_key query_key_value "
    "key_value_heads public_key bos_token eos_token pad_token_id mask_token monkey turkey private_heads design "
    "signal significant lowpass highpass bandpass trespass overpass multipass "
)


def test_secret_names() -> None:
    for name in SECRET_NAMES.split():
        assert secrecy(name) > Secrecy.VAGUE, name
        assert redact({name: "c4nary"}) == {name: "***"}
        assert redact_text(f"{name}=c4nary x") == f"{name}=*** x"
        assert redact({name: True, "x": {name: None}}) == {name: True, "x": {name: None}}


def test_open_names() -> None:
    for name in OPEN_NAMES.split():
        value = {name: "c4nary", "nested": [{name: 1.5}]}
        assert redact(value) == value
        assert redact_text(f"{name}=c4nary {name}: c4nary '{name}': 'c4nary'").count("c4nary") == 3, name


def test_a_number_is_a_count_under_tokens_and_a_secret_under_password() -> None:
    assert redact({"tokens": 4096, "token": 3, "password": 1234}) == {"tokens": 4096, "token": 3, "password": "***"}
    assert redact({"key": "left", "tokens": [1, 2]}) == {"key": "left", "tokens": [1, 2]}
    assert redact({"key": "9fK2mmQx01"}) == {"key": "***"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("password=c4 and more", "password=*** and more"),
        ("login with pwd: c4nary", "login with pwd: ***"),
        ("https://x.org/a?token=c4&page=1", "https://x.org/a?token=***&page=1"),
        ("https://x.org/a?v=1&sig=c4%2Fx", "https://x.org/a?v=1&sig=***"),
        ("a?X-Amz-Date=1&X-Amz-Signature=c4", "a?X-Amz-Date=1&X-Amz-Signature=***"),
        ("--password c4nary --steps 5", "--password *** --steps 5"),
        ("password=(c4nary)", "password=(***)"),
        ("'password' => 'c4nary'", "'password' => '***'"),
        ("postgres://me:p@ss@host/db", "postgres://***@host/db"),
        ("me:c4nary@db.x.org/a", "me:***@db.x.org/a"),
        ("Authorization: Basic YzRuYXJ5", "Authorization: ***"),
        ("'Bearer c4nary.x'", "'Bearer ***'"),
        ("-----BEGIN PRIVATE KEY-----\nA\n" + PEM_END, "-----BEGIN PRIVATE KEY-----***" + PEM_END),
        ('{"api_key": "c4", "tokens": 5}', '{"api_key": "***", "tokens": 5}'),
        ("my_key: c4nary\nb: 1", "my_key: ***\nb: 1"),
        ("use hf_C4naryC4nary", "use ***"),
        ('password="c4nary', 'password="***'),
        ("password='c4nary and more", "password='*** and more"),
        ('password = """c4\nnary"""', 'password = """***"""'),
        ('{"password": {"a": {"b": "c4nary"}}, "b": 1}', '{"password": ***, "b": 1}'),
        ("password=[[1, [c4nary]], c4] x", "password=*** x"),
        (r'"{\"password\": \"c4nary\", \"b\": 1}"', r'"{\"password\": \"***\", \"b\": 1}"'),
        ("https://hooks.slack.com/services/T0/B0/c4Nary ok", "https://hooks.slack.com/*** ok"),
        ("(https://discord.com/api/webhooks/1/c4-na_ry)", "(https://discord.com/api/webhooks/***)"),
        ("eyJhbGciOi.eyJzdWIi.c4", "***"),
    ],
)
def test_only_the_secret_part_of_a_text_is_blanked(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert redact_text(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "unknown key 'x'; write key=value",
        "missing key: blocks.0.w",
        "login: auth: failed for me",
        "git@github.com:me/repo, me@x.org",
        "hf_tokenizer hf_config_2 sk-learn task-something",
        "12:30:45 rank 1: step 3: loss 2.0 tokens=4096",
        "def build(config, password: str):",
        "https://slack.com/help https://discord.com/channels/1",
        "if key == 'left' and a == b and tokens == 4096 and hf_token == None",
        "tokens=[1, 2.5] tokens=(4096, 512)",
    ],
)
def test_other_text_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


def test_settings_of_every_command_stay_readable() -> None:
    kinds = [kind for options in GROUP_OPTIONS.values() for kind in options.values() if kind is not TextDataConfig]
    kinds += [primary.schema for primary in PRIMARIES]
    for record in filter(None, [RunConfig(), TextDataConfig(files="*.txt"), *map(_made, kinds)]):
        assert redact(config_to_dict(record)) == config_to_dict(record)
    names = {item.name for primary in PRIMARIES for item in fields(primary.schema)}
    assert {name for name in names if secrecy(name) != Secrecy.NONE} == set()


def _made(kind: Any) -> Any:
    try:
        return kind()
    except Exception:  # a required key
        return None


def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "c4nary value/1")
    monkeypatch.setenv("SOME_PASSWORD", "12345678")
    monkeypatch.setenv("AUTH", "true")
    monkeypatch.setenv("NUM_TOKENS", "4096000")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp")
    assert redact_text("a c4nary value/1, b c4nary%20value%2F1; true /tmp 4096000") == "a ***, b ***; true /tmp 4096000"
    value = {"a": ["x-c4nary value/1-y", 12345678, 4096000, True], "c4nary value/1": 1}
    assert redact_values(value) == {"a": ["x-***-y", "***", 4096000, True], "***": 1}


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("GLOBAL_BATCH_TOKENS", "524288", False),
        ("API_TOKEN_2", "c4nary", True),
        ("KEY", "default", False),
        ("KEY", "c4nary001", True),
        ("AUTH_HOST", "localhost:8080", False),
        ("BASIC_AUTH", "me:c4nary!", True),
        ("PASSWORD", "524288", True),
    ],
)
def test_an_ordinary_value_of_a_variable_is_no_secret(
    name: str, value: str, is_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    record = {"note": value, "number": 524288}
    expected = {"note": "***" if is_secret else value, "number": "***" if name == "PASSWORD" else 524288}
    assert redact_values(record) == redact(record) == expected


def test_a_value_under_a_secret_key_is_blanked_everywhere() -> None:
    tree = {"note": "hello c4nary-remembered", "api_key": "c4nary-remembered", "password": "short"}
    blanked = {"note": "hello ***", "api_key": "***", "password": "***"}
    assert redact(tree) == redact(blanked) == redact(redact(tree)) == blanked
    assert redact_text("cannot log in with c4nary-remembered, a short word") == "cannot log in with ***, a short word"


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("***", "anything", True),
        ("x-***-y", "x-1-y", True),
        ("x-***-y", "x-1-z", False),
        (["***", 1], ["a", 1], True),
        (["***", 1], ["a", 2], False),
        ({"a": "***"}, {"a": 5}, True),
        ("***", None, False),
        (1, 1, True),
    ],
)
def test_a_blank_equals_any_secret(a: Any, b: Any, equal: bool) -> None:
    assert equal_but_for_secrets(a, b) is equal_but_for_secrets(b, a) is equal


@pytest.mark.parametrize(
    "text",
    [
        *("a-" * 60_000, "://a:" * 25_000, "token=" * 20_000, "eyJ" * 40_000),
        *(f"token={opening}" * 15_000 for opening in ("{", "<", '"', "{[(", '\\"')),
        "token=[" + "1, " * 40_000,
        "key=(" + "{" * 100_000,
    ],
)
def test_time_is_linear(text: str) -> None:
    begin = time.process_time()
    redact_text(text)
    assert time.process_time() - begin < 1
