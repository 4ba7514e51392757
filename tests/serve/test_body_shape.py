"""Bodies are counted as `json` would read them, and what is too much is refused without being parsed."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelwright.serve.api import parsing
from modelwright.serve.api.chat import ChatRequest
from modelwright.serve.api.completions import CompletionRequest
from modelwright.serve.api.encode import DetokenizeRequest
from modelwright.serve.api.parsing import MAX_DEPTH, PAUSE_NUMBERS, parse_request
from modelwright.serve.errors import ApiError
from modelwright.serve.limits import KEYS_PER_TOKEN, SPARE_ENTRIES, BodyShape, Limits, body_shape, lone_surrogate

CONTEXT, MAX_CHOICES = 20_000, 4
LIMITS = Limits(context=CONTEXT, max_choices=MAX_CHOICES, max_token_bytes=10, max_body_bytes=4_000_000)

TEXTS = st.text(st.sampled_from('a\\"[]{},: \n\tuddD83é\u2028\U0001f642'), max_size=8) | st.text(max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5), max_leaves=40
)


def parsed_shape(value: Any) -> BodyShape:
    """The naive twin: counts what `json` made of a body."""
    if not isinstance(value, (list, dict)):
        return BodyShape(entries=0, longest=0, containers=0, keys=0, depth=0)
    own = max(1, len(value))
    inner = [parsed_shape(child) for child in (value.values() if isinstance(value, dict) else value)]
    return BodyShape(
        entries=own + sum(shape.entries for shape in inner),
        longest=max([own, *(shape.longest for shape in inner)]),
        containers=1 + sum(shape.containers for shape in inner),
        keys=(len(value) if isinstance(value, dict) else 0) + sum(shape.keys for shape in inner),
        depth=1 + max((shape.depth for shape in inner), default=0),
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_the_shape_is_that_of_the_parsed_body(value: Any, ensure_ascii: bool, indent: Any):
    body = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode("utf-8", errors="replace")
    assert body_shape(body) == parsed_shape(json.loads(body))


@pytest.mark.parametrize("body", [b"", b"]]]],,", b'"', b"\\", b'"\\', b"[,[" * 100_000, b'[1,"a', b"}{", b"\xff,["])
def test_what_is_no_json_is_counted_without_an_error(body: bytes):
    body_shape(body)


@pytest.mark.parametrize(
    ("body", "is_closed"),
    [(b"", True), (b"[]", True), (b"[", False), (b'["a]', False), (b"[]]", False), (b'{"a": "\\"}', False)],
)
def test_what_has_no_end_is_seen(body: bytes, is_closed: bool):
    assert body_shape(body).is_closed == is_closed


def test_levels_beyond_the_deepest_are_counted():
    body = b"[" * 70_000 + b"1" + b"]" * 70_000
    assert body_shape(body) == BodyShape(entries=70_000, longest=1, containers=70_000, keys=0, depth=70_000)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["\\ud83d", "\\uDE42", "\\\\", "ud83d", "\\u0041", "a", "\\n", "\\uDbff", "é"])))
def test_lone_halves_are_those_that_utf_8_refuses(pieces: list[str]):
    body = ('{"a": "' + "".join(pieces) + '"}').encode()
    try:
        json.loads(body)["a"].encode()
        half = ""
    except UnicodeEncodeError as error:
        half = error.object[error.start]
    assert lone_surrogate(body) == half


def refused(kind: Any, body: bytes, monkeypatch: pytest.MonkeyPatch) -> ApiError:
    def loads(*arguments: object, **options: object) -> None:
        raise AssertionError("shapes are checked first")

    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", loads)
        with pytest.raises(ApiError) as caught:
            parse_request(kind, body, LIMITS)
    assert caught.value.status == 400
    return caught.value


def completion(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | fields).encode()


def test_one_entry_above_the_limit_is_refused_without_being_parsed(monkeypatch: pytest.MonkeyPatch):
    most = CONTEXT + SPARE_ENTRIES
    with pytest.raises(ApiError, match=f"{most} token ids in 'prompt'"):
        parse_request(CompletionRequest, completion([1] * most), LIMITS)
    error = refused(CompletionRequest, completion([1] * (most + 1)), monkeypatch)
    assert f"a list or object with {most + 1} entries; at most {most} are read" in str(error)
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("end", ["", "]", ', "a'])
def test_a_large_body_that_was_cut_is_no_json(end: str, monkeypatch: pytest.MonkeyPatch):
    body = completion([1] * (CONTEXT + SPARE_ENTRIES + 1))[:-2] + end.encode()
    assert "not valid JSON: a string, list or object in it has no end" in str(
        refused(CompletionRequest, body, monkeypatch)
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model": "\xff"}', "it is not UTF-8 text"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "it has an integer with too many digits"),
        (b"[" * 10_000 + b"]" * 10_000, "it is nested too deep"),
        (b'{"model": }', "Expecting value"),
    ],
)
@pytest.mark.parametrize("padding", [0, parsing.UNCOUNTED_BYTES])
def test_the_reason_is_that_of_this_body(body: bytes, reason: str, padding: int):
    with pytest.raises(ApiError, match=f"not valid JSON: {reason}"):
        parse_request(CompletionRequest, body + b" " * padding, LIMITS)


@pytest.mark.parametrize(
    ("kind", "count", "entry", "most", "words"),
    [
        ("lists", "containers", "[[]]", CONTEXT + SPARE_ENTRIES, "lists and objects"),
        ("objects", "containers", '{"":{}}', CONTEXT + SPARE_ENTRIES, "lists and objects"),
        ("keys", "keys", '{"a":0,"b":0,"c":0,"d":0}', CONTEXT * KEYS_PER_TOKEN + SPARE_ENTRIES, "keys"),
        ("entries", "entries", f"[{'1,' * 9999}1]", CONTEXT * MAX_CHOICES + SPARE_ENTRIES, "entries"),
    ],
)
def test_each_count_has_a_limit(kind, count, entry, most, words, monkeypatch: pytest.MonkeyPatch):
    of_one, entries = getattr(body_shape(entry.encode()), count), [entry]
    entries *= most // of_one + 1
    body = f'{{"model":"m","prompt":[{",".join(entries)}]}}'.encode()
    assert f"{words}; at most {most} are read" in str(refused(CompletionRequest, body, monkeypatch))


def test_what_is_too_deep_is_refused_without_being_parsed(monkeypatch: pytest.MonkeyPatch):
    body = b'{"model":"m","prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    assert "nested too deep" in str(refused(CompletionRequest, body, monkeypatch))
    with pytest.raises(ApiError, match="nested too deep"):
        parse_request(CompletionRequest, b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), LIMITS)


def test_the_largest_requests_within_the_limits_are_read(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    prompts = [[random.randrange(10) for _ in range(CONTEXT - 1)] for _ in range(MAX_CHOICES)]
    stop, metadata = ["a"] * 16, {str(number): "" for number in range(1024)}
    asked = parse_request(CompletionRequest, completion(prompts, stop=stop, metadata=metadata), LIMITS)
    assert asked.prompts == prompts
    assert len(pauses) == (CONTEXT - 1) * MAX_CHOICES // PAUSE_NUMBERS
    assert parse_request(DetokenizeRequest, json.dumps({"tokens": prompts[0]}).encode(), LIMITS).tokens == prompts[0]
    texts = ['",[]{}\\' * 20_000] * MAX_CHOICES
    assert parse_request(CompletionRequest, completion(texts), LIMITS).prompts == texts
    parts = [{"type": "text", "text": "a"}] * (CONTEXT - 1)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
    assert parse_request(ChatRequest, body, LIMITS).texts() == ["\n".join("a" * (CONTEXT - 1))]
    turns = [{"role": "user", "content": [parts[0]]}] * (CONTEXT // 3)
    body = json.dumps({"model": "m", "messages": turns}).encode()
    assert len(parse_request(ChatRequest, body, LIMITS).messages) == CONTEXT // 3


def test_tools_with_large_schemas_are_read():
    fields = {f"field_{number}": {"type": "string", "enum": ["a,b", '"[']} for number in range(1000)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": fields}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [tool] * 5}
    assert parse_request(ChatRequest, json.dumps(body).encode(), LIMITS).tools


@pytest.mark.parametrize("number", ["1", "-0", "1e5", "-2.5E-3", "1" + "0" * 400, "1" * 5000, "NaN", "Infinity", "01"])
def test_a_large_body_is_read_as_json_reads_it(number: str):
    body = f'{{"model": "m", "seed": {number}, "top_p": {number}, "user": "{" " * parsing.UNCOUNTED_BYTES}"}}'.encode()
    try:
        known = json.loads(body)
    except ValueError:
        with pytest.raises(ApiError, match="not valid JSON"):
            parsing._load(body, LIMITS)
    else:
        assert repr(parsing._load(body, LIMITS)) == repr(known)
