"""Readers of calls and thoughts: every form, cut anywhere, with text that only looks like a call."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelwright.serve.agents.calls import Function, TextPart
from modelwright.serve.agents.forms import FORMS, choose_form
from modelwright.serve.agents.reasoning import AnswerReader
from modelwright.serve.engines.grammars import GrammarCompiler, GrammarSource, Thought
from serve.conftest import make_served_tokenizer

NAMES = ("get_tide", "add")
ARGUMENTS = {"town": 'Bar "}]" ü', "n": [1, {"a": None}], "ok": True}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
ONE = f'{{"name": "get_tide", "arguments": {TEXT}}}'
OTHER = '{"arguments": {"a": 1}, "name": "add"}'
PYTHON = "[get_tide(town='Bar \"}]\" ü', n=[1, {'a': null}], ok=True), add(a=1)]"
CALLS = [("get_tide", ARGUMENTS), ("add", {"a": 1})]
ANSWERS = [
    ("hermes", f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>", CALLS,
     "Let me see.\n"),
    ("mistral", f"[TOOL_CALLS][{ONE}, {OTHER}]", CALLS, ""),
    ("llama3_json", f'{{"name": "get_tide", "parameters": {TEXT}}}; {OTHER}', CALLS, ""),
    ("json", f"{ONE}\n{OTHER}", CALLS, ""),
    ("own", ONE, CALLS[:1], ""),
    ("pythonic", PYTHON, CALLS, ""),
]  # fmt: skip
LOOKALIKES = [
    ("hermes", 'use <tool_call> tags; {"name": "get_tide", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_tide", "arguments": 7}</tool_call>'),
    ("hermes", "<tool_ca"),
    ("mistral", "[TOOL_CALLS] are a token"),
    ("json", 'The call is {"name": "get_tide", "arguments": {}}'),
    ("json", '{"answer": 42}'),
    ("json", '{"name": "get_tide", "argum'),
    ("own", "[1, 2, 3]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[__import__('os').system('true')]"),
    ("pythonic", "[add(a=open('x'))]"),
    ("pythonic", "[add(1)]"),
]


def read(form: str, pieces: list[str], state: str = "text", most: int = 8):
    """Returns thought, text and calls of an answer that arrives in pieces."""
    reader = AnswerReader(state, FORMS[form].parser(NAMES, most=most))  # type: ignore[arg-type]
    texts, calls = {"content": "", "reasoning_content": ""}, {}
    for number, piece in enumerate(pieces):
        for part in reader.push(piece, is_last=number == len(pieces) - 1):
            if isinstance(part, TextPart):
                texts[part.field] += part.text
            else:
                name, arguments = calls.get(part.index, ("", ""))
                calls[part.index] = (name + part.name, arguments + part.arguments)
    return texts["reasoning_content"], texts["content"], [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize(("form", "answer", "calls", "text"), ANSWERS)
def test_calls_are_the_same_wherever_the_stream_is_cut(form, answer, calls, text):
    whole = read(form, [answer])
    assert whole[1] == text
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == calls
    for place in range(len(answer) + 1):
        assert read(form, [answer[:place], answer[place:]]) == whole
    assert read(form, [*answer, ""]) == whole


@pytest.mark.parametrize(("form", "answer"), LOOKALIKES)
def test_text_that_looks_like_a_call_stays_text(form, answer):
    for pieces in ([answer], list(answer), [answer[:7], answer[7:]]):
        assert read(form, pieces) == ("", answer, [])


@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", ONE, OTHER, "{", "}", "[", "]", '"', "x",
                              "\n", " ", ",", ";", "<think>", "</think>",
                              '{"name": "add", "arguments": {']), max_size=8),
    st.sampled_from(["before", "thought", "text"]),
    st.data(),
)  # fmt: skip
def test_any_text_reassembles(form, parts, state, data):
    answer = "".join(parts)
    whole = read(form, [answer], state)
    places = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *places], [*places, len(answer)], strict=True)]
    assert read(form, pieces, state) == whole
    assert read(form, [*answer, ""], state) == whole


def test_thoughts_are_apart_from_the_answer():
    for pieces in (["<think>\nhm <b>\n</think>\n\nYes. </think>"], list("<think>\nhm <b>\n</think>\n\nYes. </think>")):
        assert read("own", pieces, "before") == ("hm <b>", "Yes. </think>", [])
    assert read("own", ["so\n</think>\n", ONE], "thought")[2][0][0] == "get_tide"
    assert read("own", ["no <think>"], "before") == ("", "no <think>", [])
    assert read("own", ["cut"], "thought") == ("cut", "", [])


def test_only_as_many_calls_as_may_be_made():
    assert [len(read(form, [answer], most=1)[2]) for form, answer, _, _ in ANSWERS] == [1] * len(ANSWERS)


def test_the_template_chooses_the_form():
    assert choose_form("auto", "{{ '<tool_call>' }}", takes_tools=True).name == "hermes"
    assert choose_form("auto", "{{ '[TOOL_CALLS]' }}", takes_tools=True).name == "mistral"
    assert choose_form("auto", "{{ tools }}", takes_tools=True).name == "json"
    assert choose_form("mistral", "{{ '<tool_call>' }}", takes_tools=True).name == "mistral"
    assert choose_form("hermes", "", takes_tools=False).name == "own"


def spell(constraint, ids: list[int]) -> bool:
    """Whether a constraint allows these tokens one after the other."""
    for token in ids:
        if not constraint.allowed()[token]:
            return False
        constraint.advance(token)
    return True


def test_marks_of_several_tokens_begin_a_thought_and_a_call_alike():
    """`<think>` and `<tool_call>` begin with the same token, and a thought may contain the beginning of its end."""
    pytest.importorskip("llguidance")
    tokenizer = make_served_tokenizer()
    compiler = GrammarCompiler(tokenizer.definition, 336, tokenizer.stop_ids)
    begin, end = tokenizer.mark_ids("<think>"), tokenizer.mark_ids("</think>")
    call = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', with_begin=False)
    assert len(begin) > 1
    assert begin[0] == call[0]
    functions = [Function("add", {"type": "object"}, True)]
    text = FORMS["hermes"].grammar(functions, {}, most=1, is_forced=True)

    def constraint(budget: int = -1, *, is_open: bool = False):
        thought = Thought(begin, end, is_open, budget)
        return compiler.compile_now(GrammarSource("lark", text, "tools", thought)).constraint()

    thought = tokenizer.encode("a <b.", with_begin=False)
    assert spell(constraint(), call)
    assert spell(constraint(), [*begin, *thought, *end, *call])
    assert spell(constraint(is_open=True), [*thought, *end, *call])
    assert not spell(constraint(), thought)
    assert not spell(constraint(), [*begin[:-1], *call])
    inside = constraint(is_open=True)
    assert not inside.allowed()[list(tokenizer.stop_ids)].any(), "an answer ends with its call, not in the thought"
    limited = constraint(2, is_open=True)
    assert spell(limited, [*thought[:2], *end, *call])
    assert not spell(constraint(2, is_open=True), tokenizer.encode("abcde", with_begin=False))
    free = compiler.compile_now(GrammarSource("any", "", "x", Thought(begin, end, True, 1))).constraint()
    assert spell(free, [thought[0], *end, *thought, tokenizer.stop_ids[0]])


SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 3}, "n": {"$ref": "#/$defs/n"}},
    "required": ["town"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_grammars_accept_their_own_form_alone(form):
    pytest.importorskip("llguidance")
    tokenizer = make_served_tokenizer()
    compiler = GrammarCompiler(tokenizer.definition, 336, tokenizer.stop_ids)
    functions = [Function("get_tide", SCHEMA, True), Function("add", {"type": "object"}, True)]
    good = {
        "hermes": '<tool_call>\n{"name": "get_tide", "arguments": {"town": "Bar", "n": 3}}\n</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "get_tide", "arguments": {"town": "Bar"}}]',
        "llama3_json": '{"name": "get_tide", "parameters": {"town": "Bar", "n": 3}}',
        "pythonic": '[get_tide(town="Bar", n=3)]',
    }.get(form, '{"name": "get_tide", "arguments": {"town": "Bar", "n": 3}}')
    assert read(form, [good])[2][0][0] == "get_tide"

    def takes(text: str, *, is_forced: bool) -> bool:
        source = GrammarSource("lark", FORMS[form].grammar(functions, {}, most=2, is_forced=is_forced), "tools")
        matcher = compiler.compile_now(source).matcher.deep_copy()
        ids = tokenizer.encode(text, with_begin=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for is_forced in (True, False):
        assert takes(good, is_forced=is_forced)
        assert not takes(good.replace("Bar", "Barbarossa"), is_forced=is_forced)
        assert takes("It is high.", is_forced=is_forced) is not is_forced
