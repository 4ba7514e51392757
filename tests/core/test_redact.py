"""Secrets do not reach run.json, the report or a log."""

import pytest

from modelwright.core.texts import redact_plain, redact_text, redact_words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/data.jsonl", "https://***@host/data.jsonl"),
        ("https://host/x?token=abc&part=2", "https://host/x?token=***&part=2"),
        ("s3://bucket/key/file.parquet", "s3://bucket/key/file.parquet"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_command_lines() -> None:
    words = ["run", "tiny", "--data.sources", "https://u:p@h/x", "--hub.api_key", "s1", "--x.token=s2", "--seed", "3"]
    assert redact_words(words) == [
        "run", "tiny", "--data.sources", "https://***@h/x", "--hub.api_key", "***", "--x.token=***", "--seed", "3",
    ]  # fmt: skip


def test_ordinary_settings_stay() -> None:
    words = ["--pretrain.batch_tokens", "2048", "--tokenizer.vocab_size=512", "--serve_check.max_tokens", "7"]
    assert redact_words(words) == words
    plain = {"serve": {"api_key_env": "", "max_tokens": 3}, "data": {"sources": ["ftp://a:b@c/d"]}, "secret": "x"}
    assert redact_plain(plain) == {
        "serve": {"api_key_env": "", "max_tokens": 3}, "data": {"sources": ["ftp://***@c/d"]}, "secret": "***",
    }  # fmt: skip
