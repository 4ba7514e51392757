"""Decoding against `tokenizers`: any ids, whole and as a stream, for kinds of vocabulary."""

from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from modelwright.data.tokenizer.tokenizer import Tokenizer
from published_templates import CHATML, KINDS, library


@cache
def pair(kind: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    made = library(kind, CHATML)
    return made, Tokenizer(made, special_tokens={"eos_token": "<|im_end|>"}, template="{{ messages[0].content }}")


def check(made: tokenizers.Tokenizer, tokenizer: Tokenizer, ids: list[int], skips: bool) -> None:
    expected = made.decode(ids, skip_special_tokens=skips)
    assert tokenizer.decode(ids, skip_special=skips) == expected
    stream = tokenizer.stream(skip_special=skips)
    pieces = [*(stream.step(one) for one in ids), stream.finish()]
    assert "".join(pieces) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skips=st.booleans())
def test_pieces_and_whole_are_those_of_tokenizers(kind: str, data: Any, skips: bool) -> None:
    made, tokenizer = pair(kind)
    size = made.get_vocab_size()
    # runs of bytes often, whole characters among them
    text = st.text(max_size=4).map(lambda one: made.encode(one, add_special_tokens=False).ids)
    runs = st.one_of(
        st.lists(st.integers(0, size - 1), max_size=6), st.lists(st.integers(1, min(256, size - 1)), max_size=6), text
    )
    check(made, tokenizer, [one for run in data.draw(st.lists(runs, max_size=5)) for one in run], skips)


@pytest.mark.parametrize("decoder", [None, decoders.BPEDecoder(), decoders.CTC("a", "|", True), decoders.Fuse()])
@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=8))
def test_other_decoders(decoder: Any, ids: list[int]) -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b</w>": 1, "c": 2, "|": 3, ".": 4, "</s>": 5}, "a"))
    if decoder is not None:
        made.decoder = decoder
    tokenizer = Tokenizer(made, special_tokens={"eos_token": "</s>"}, template="{{ messages[0].content }}")
    check(made, tokenizer, ids, False)


def test_text_arrives_while_it_is_decoded() -> None:
    made, tokenizer = pair("llama2")
    stream = tokenizer.stream()
    ids = made.encode("the cat 😀 sat", add_special_tokens=False).ids
    pieces = [stream.step(one) for one in ids]
    assert "".join(pieces) == "the cat 😀 sat"
    assert pieces[0] == "the", "at once, without the blank before a text"
    half = stream.step(tokenizer._library.token_to_id("<0xF0>")) + stream.step(made.token_to_id("<0x9F>"))
    assert half == ""
    assert stream.finish() == "\ufffd\ufffd", "a character for each byte, as the library has it"


def test_an_unknown_id_is_an_error() -> None:
    for kind in ("byte-bpe", "llama2"):
        made, tokenizer = pair(kind)
        with pytest.raises(ValueError, match="is not in the vocabulary"):
            tokenizer.decode([made.get_vocab_size() + 5])
