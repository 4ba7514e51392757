"""Text assembly: characters over several tokens, stop strings at any cut."""

import random

import pytest

from modelwright.data.tokenizer.decode import ByteStream
from modelwright.serve.load import IncrementalDetokenizer


def of_bytes() -> ByteStream:
    return ByteStream({byte: bytes([byte]) for byte in range(256)})


def feed(text: str, stops: tuple[str, ...] = ()) -> tuple[str, str, list[str]]:
    answer = IncrementalDetokenizer(of_bytes(), stops)
    shown: list[str] = []
    for byte in text.encode():
        piece = answer.push(byte, 0.0, ())
        shown.append(piece.text)
        if piece.finish_reason:
            return "".join(shown), piece.finish_reason, shown
    last = answer.finish("length")
    return "".join(shown) + last.text, last.finish_reason, [*shown, last.text]


def test_characters_come_whole():
    text = "größer — 日本語 🙂 fine"
    whole, reason, pieces = feed(text)
    assert (whole, reason) == (text, "length")
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_replaced_at_the_end():
    answer = IncrementalDetokenizer(of_bytes())
    assert answer.push("é".encode()[0], 0.0, ()).text == ""
    assert answer.finish("length").text == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_against_a_plain_search(seed):
    draw = random.Random(seed)
    text = "".join(draw.choice("abé") for _ in range(60))
    stops = tuple("".join(draw.choice("abé") for _ in range(draw.randint(2, 5))) for _ in range(3))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    shown, reason, _ = feed(text, stops)
    if not ends:
        assert (shown, reason) == (text, "length")
    else:
        seen = text[: min(ends)]
        assert (shown, reason) == (seen[: min(seen.find(stop) for stop in stops if stop in seen)], "stop")


def test_tokens_come_with_their_text():
    answer = IncrementalDetokenizer(of_bytes(), ("xyz",))
    pieces = [answer.push(byte, -1.0, ()) for byte in b"abxq"] + [answer.finish("length")]
    assert [[token.token_id for token in piece.tokens] for piece in pieces] == [[97], [98], [], [120, 113], []]
    assert [token.offset for piece in pieces for token in piece.tokens] == [0, 1, 2, 3]
