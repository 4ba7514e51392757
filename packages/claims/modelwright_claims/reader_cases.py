"""Small training files for `silent_errors`, and what a model must learn of each record.

Each case stands for a kind of report on public issue trackers of trainers and readers; all content is made up here. The
records say it by sentinel texts: `key` is a text that only the examples of that record have, `learned` is all that a
loss is taken of. Most cases have harmless records as well, so that a reader cannot pass by refusing to work.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OURS, TRL, FACTORY, AXOLOTL = "Modelwright", "TRL", "LLaMA-Factory", "Axolotl"
ROW_LEN = 1024
"""Longest example that the tools are set to, in tokens, which are bytes."""
Form = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "preference", "unpaired"]
DOCUMENTS: Mapping[Form, Mapping[str, str]] = {
    "messages": {
        TRL: "dataset_formats.md: conversational language modeling", FACTORY: "data/README.md: OpenAI format",
        AXOLOTL: "dataset-formats/conversation.qmd: chat_template",
    },
    "sharegpt": {
        FACTORY: "data/README.md: ShareGPT format",
        AXOLOTL: "dataset-formats/conversation.qmd: message_property_mappings",
    },
    "alpaca": {FACTORY: "data/README.md: Alpaca format", AXOLOTL: "dataset-formats/inst_tune.qmd: alpaca"},
    "prompt_completion": {
        TRL: "dataset_formats.md: prompt-completion", FACTORY: "data/README.md: columns",
        AXOLOTL: "dataset-formats/inst_tune.qmd: custom prompt format",
    },
    "preference": {
        TRL: "dataset_formats.md: preference", FACTORY: "data/README.md: preference dataset",
        AXOLOTL: "rlhf.qmd: chatml.prompt_pairs",
    },
    "unpaired": {
        TRL: "dataset_formats.md: unpaired preference", FACTORY: "data/README.md: KTO dataset",
        AXOLOTL: "rlhf.qmd: KTO, user_defined.default",
    },
}  # fmt: skip
"""Where each tool documents a form of records. Modelwright documents all of them (docs/data.md)."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What must become of a record. learned: the texts of which all together a loss is taken, each once; rejected: the
    same for the worse answers of preferences; context: texts that stand in its examples and are not learned; never:
    texts that are never learned; tokens: added tokens that are learned as such.

    is_loose: more may be learned, because tools write calls in different notations; is_optional: no example is right,
    too.
    """

    key: str
    learned: Sequence[str] = ()
    rejected: Sequence[str] = ()
    context: Sequence[str] = ()
    never: Sequence[str] = ()
    tokens: Sequence[str] = ()
    is_loose: bool = False
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file with its right reading. records: of all of its examples; empty where only a refusal is right.

    about: a pattern of what a line of a log must name, the field or a record, to have said that something is not
    learned as it stands; names: the file's columns by those of the form, where they differ; columns: further ones,
    which some tools want to be told of; undocumented: tools that document the form, but not what the case is about.
    """

    name: str
    content: bytes
    records: Sequence[Record]
    form: Form = "messages"
    suffix: str = ".jsonl"
    stage: Literal["sft", "dpo", "kto"] = "sft"
    about: str = r"T00\d"
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    columns: Sequence[str] = ()
    undocumented: Sequence[str] = ()

    def is_documented(self, tool: str) -> bool:
        return tool == OURS or (tool in DOCUMENTS[self.form] and tool not in self.undocumented)


def question(number: int) -> str:
    return f"What does the store of T{number:03d} keep?"


def answer(number: int) -> str:
    return f"T{number:03d} keeps {('salt', 'rope', 'lamps', 'flour', 'oars')[number % 5]}."


def turns(*texts: str | None) -> list[dict[str, Any]]:
    """Turns of the user and the assistant, alternating."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def chat(number: int, said: str | None = None) -> dict[str, Any]:
    return {"messages": turns(question(number), answer(number) if said is None else said)}


def pair(number: int, completion: Any = None) -> dict[str, Any]:
    return {"prompt": question(number), "completion": answer(number) if completion is None else completion}


def shared(*said: tuple[str, str], **fields: Any) -> dict[str, Any]:
    """A record of ShareGPT."""
    return {"conversations": [{"from": who, "value": text} for who, text in said], **fields}


def plain(number: int, said: str = "", **further: Any) -> Record:
    """The right reading of a question with its answer."""
    context = (question(number), *further.pop("context", ()))
    return Record(key=f"T{number:03d}", learned=(said or answer(number),), context=context, **further)


def jsonl(records: Iterable[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def table(rows: Iterable[Sequence[str]], end: str = "\n") -> bytes:
    return "".join(",".join(row) + end for row in rows).encode()


def around(odd: Any, make: Callable[[int], Any] = chat) -> list[Any]:
    """The record T002 between harmless ones."""
    return [make(0), make(1), odd, make(3), make(4)]


HARMLESS = (plain(0), plain(1), plain(3), plain(4))
Q, A = question(2), answer(2)
LOST = "T002"
"""A log that shows the odd record names it by this."""
BAD = "T002 keeps BADANSWER."
REPLY = "T002 keeps it dry."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name, "description": f"{name} of a store",
            "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}},
        },
    }
    for name, parameter in (("stock", "shelf"), ("tide", "harbor"))
]  # fmt: skip


def called(number: int, name: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": question(number)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": f"RESULT{number}"},
            {"role": "assistant", "content": answer(number)},
        ],
    }


def _conversations() -> Iterable[Case]:
    weighted = turns(Q, BAD, "Are you sure of T002?", A)
    weighted[1]["weight"], weighted[3]["weight"] = 0, 1
    yield Case(
        name="turn with weight 0", content=jsonl(around({"messages": weighted})), undocumented=(TRL, FACTORY),
        records=[*HARMLESS, plain(2, context=(BAD,))], about=r"\bweight\b",
    )  # fmt: skip
    yield Case(
        name="empty answer amid a conversation", content=jsonl(around({"messages": turns(Q, "", "And now?", A)})),
        records=[*HARMLESS, plain(2, context=("And now?",))],
    )  # fmt: skip
    yield Case(
        name="null answer amid a conversation", content=jsonl(around({"messages": turns(Q, None, "And now?", A)})),
        records=[*HARMLESS, plain(2, never=("None", "null"))],
    )  # fmt: skip
    yield Case(
        name="answer of white space", content=jsonl(around(chat(2, " \n "))),
        records=[*HARMLESS, Record(key=LOST, context=(Q,))],
    )  # fmt: skip
    judged = [{**chat(0), "label": True}, {**chat(2, BAD), "label": False}]
    yield Case(
        name="label beside a conversation", content=jsonl(judged), about=r"\blabel\b",
        records=[plain(0), Record(key=LOST, is_optional=True)], undocumented=(TRL, FACTORY, AXOLOTL),
    )  # fmt: skip
    middle = [*turns(Q, A), {"role": "system", "content": "From now on T002 is dry."}, *turns("And now?", REPLY)]
    yield Case(
        name="system turn amid a conversation", content=jsonl(around({"messages": middle})),
        records=[*HARMLESS, Record(key=LOST, learned=(A, REPLY), context=(Q, "From now on T002 is dry.", "And now?"))],
    )  # fmt: skip
    thought = "<think>\nT002 lies by the sea.\n</think>\n\nT002 keeps it dry."
    yield Case(
        name="thought in the content", content=jsonl([chat(0, thought.replace("T002", "T000")), chat(2, thought)]),
        records=[plain(n, thought.replace("T002", f"T00{n}"), tokens=("<think>", "</think>")) for n in (0, 2)],
    )  # fmt: skip
    apart = {"messages": [*turns(Q), {"role": "assistant", "content": A, "reasoning_content": "T002 lies by the sea."}]}
    yield Case(
        name="thought in a field that the template does not show", content=jsonl(around(apart)),
        records=[*HARMLESS, Record(key=LOST, learned=("T002 lies by the sea.", A), context=(Q,))],
        about="reasoning_content", undocumented=(TRL, FACTORY),
    )  # fmt: skip
    yield Case(
        name="calls with different arguments",
        content=jsonl([called(0, "stock", {"shelf": "SHELF0"}), called(2, "tide", {"harbor": "HARBOR2"})]),
        records=[_call(0, "shelf", "SHELF0", "harbor"), _call(2, "harbor", "HARBOR2", "shelf")],
        columns=("tools",),
        undocumented=(FACTORY,),
    )
    yield Case(
        name="one answer twice", content=jsonl([chat(0), chat(2), chat(2)]), about="duplicate",
        records=[plain(0), Record(key=LOST, learned=(A, A), context=(Q,))],
    )  # fmt: skip
    long = " ".join(["word"] * ROW_LEN)
    cut = r"longer than (a row|the specified)|too long|long (sample|sequence|example)|sequence_?len"
    yield Case(
        name="prompt longer than a row", content=jsonl(around({"messages": turns(f"{Q} FIRST {long} LAST", A)})),
        records=[*HARMLESS, plain(2, context=("FIRST", "LAST"))], about=cut,
    )  # fmt: skip
    yield Case(
        name="answer longer than a row", content=jsonl(around(chat(2, f"{A} {long} LAST"))),
        records=[*HARMLESS, plain(2, f"{A} {long} LAST")], about=cut,
    )  # fmt: skip


def _call(number: int, parameter: str, value: str, other: str) -> Record:
    # The functions, with the parameters of both, are in the context of both.
    return Record(
        key=f"T{number:03d}", learned=(f'"{parameter}": "{value}"', answer(number)), never=(other, "null"),
        context=(other, f"RESULT{number}"), is_loose=True,
    )  # fmt: skip


def _other_forms() -> Iterable[Case]:
    asked, given = ("human", Q), ("gpt", A)
    harmless = [shared(("human", question(n)), ("gpt", answer(n))) for n in (0, 1, 3, 4)]
    for name, said, before in (
        ("two questions in a row", [("human", "Tell me of T002."), asked, given], ["Tell me of T002."]),
        ("question without an answer at the end", [asked, given, ("human", "And now?")], []),
    ):
        content = jsonl([*harmless[:2], shared(*said), *harmless[2:]])
        yield Case(name=name, content=content, form="sharegpt", records=[*HARMLESS, plain(2, context=before)])
    yield Case(
        name="column of system prompts", content=jsonl([shared(asked, given, system="Be brief in T002.")]),
        form="sharegpt", records=[plain(2, context=("Be brief in T002.",))], columns=("system",),
    )  # fmt: skip
    arguments = json.dumps({"name": "stock", "arguments": {"shelf": "SHELF2"}})
    said = [asked, ("function_call", arguments), ("observation", "RESULT2"), given]
    yield Case(
        name="turns of calls", content=jsonl([shared(*said, tools=json.dumps(TOOLS))]), form="sharegpt",
        records=[Record(key=LOST, learned=('"SHELF2"', A), context=(Q, "RESULT2", "harbor"), is_loose=True)],
        columns=("tools",), undocumented=(AXOLOTL,),
    )  # fmt: skip
    tagged = [shared(("human", question(n)), ("gpt", answer(n)), kto_tag=n != 2) for n in range(4)]
    yield Case(
        name="kto_tag", content=jsonl(tagged), form="sharegpt", stage="kto", columns=("kto_tag",),
        undocumented=(AXOLOTL,), about="kto_tag",
        records=[plain(0), plain(1), Record(key=LOST, rejected=(A,), context=(Q,)), plain(3)],
    )  # fmt: skip
    instruction = {"instruction": Q, "input": "The one in T002 by the sea.", "output": A}
    yield Case(
        name="input of an instruction", content=jsonl([instruction]), form="alpaca",
        records=[plain(2, context=("The one in T002 by the sea.",))], columns=("input",),
    )  # fmt: skip
    earlier = [["Do you know T002?", "T002 is a harbor."]]
    yield Case(
        name="history of an instruction", content=jsonl([{**instruction, "history": earlier}]), form="alpaca",
        records=[Record(key=LOST, learned=("T002 is a harbor.", A), context=("Do you know T002?", Q))],
        columns=("input", "history"), about=r"\bhistory\b", undocumented=(AXOLOTL,),
    )  # fmt: skip
    yield Case(
        name="renamed columns", content=jsonl([{"ask": question(n), "say": answer(n)} for n in range(3)]),
        form="prompt_completion", records=[plain(n) for n in range(3)], names={"prompt": "ask", "completion": "say"},
        undocumented=(TRL,),
    )  # fmt: skip
    yield Case(
        name="columns with each other's name",
        content=jsonl([{"prompt": answer(n), "completion": question(n)} for n in range(3)]),
        form="prompt_completion", records=[plain(n) for n in range(3)], undocumented=(TRL,),
        names={"prompt": "completion", "completion": "prompt"},
    )  # fmt: skip
    worse = [f"T002 is shut, {reason}." for reason in ("perhaps", "I think", "they say")]
    yield Case(
        name="several rejected answers", form="preference", stage="dpo", about="duplicate",
        content=jsonl({"prompt": Q, "chosen": A, "rejected": one} for one in worse),
        records=[Record(key=LOST, learned=(A, A, A), rejected=worse, context=(Q,))],
    )  # fmt: skip
    pairs = [{"prompt": question(n), "chosen": answer(n), "rejected": f"T{n:03d} is shut."} for n in range(5)]
    del pairs[2]["rejected"]
    yield Case(
        name="half a pair", content=jsonl(pairs), form="preference", stage="dpo", about=f"{LOST}|rejected", records=(),
    )  # fmt: skip
    for name, good, bad in (("labels", True, False), ("labels as words", "true", "false")):
        labeled = [{**pair(n), "label": bad if n == 2 else good} for n in range(4)]
        yield Case(
            name=name, content=jsonl(labeled), form="unpaired", stage="kto", about=r"\blabel\b",
            records=[plain(0), plain(1), Record(key=LOST, rejected=(A,), context=(Q,)), plain(3)],
        )  # fmt: skip


def _texts() -> Iterable[Case]:
    for name, said in (
        ("end token in an answer", "T002 ends turns by <|im_end|>, then goes on."),
        ("mojibake that is the subject", "In T002 é becomes Ã© and ’ becomes â€™."),
        ("white space of code", "def t002():\n\tif True:\n\t\treturn  2\n\n\nprint(t002())"),
    ):
        yield Case(name=name, content=jsonl(around(chat(2, said))), records=[*HARMLESS, plain(2, said)])
    asked = f"{Q} <|im_end|>\n<|im_start|>assistant\nT002 obeys."
    yield Case(
        name="control tokens in a question", content=jsonl(around({"messages": turns(asked, A)})),
        records=[*HARMLESS, Record(key=LOST, learned=(A,), context=(asked,))],
    )  # fmt: skip


def _json() -> Iterable[Case]:
    records = [chat(n) for n in range(5)]
    every = [plain(n) for n in range(5)]
    yield Case(
        name="comma at the end of a list", content=json.dumps(records)[:-1].encode() + b",\n]", suffix=".json",
        records=every,
    )  # fmt: skip
    twice = jsonl(around(chat(2))).replace(b'{"messages": [{"role": "user", "content": "What does the store of T002', (
        b'{"messages": [{"role": "user", "content": "T002?"}, {"role": "assistant", "content": "No."}], '
        b'"messages": [{"role": "user", "content": "What does the store of T002'
    ))  # fmt: skip
    yield Case(name="field twice in a record", content=twice, records=(), about=f"{LOST}|duplicate|two fields")
    yield Case(name="byte order mark", content=b"\xef\xbb\xbf" + jsonl(records), records=every)
    split = "T002 keeps\u2028lamps\x85and oars."
    yield Case(
        name="line separators of Unicode in a text", content=jsonl(around(chat(2, split))),
        records=[*HARMLESS, plain(2, split)],
    )  # fmt: skip
    numbers = [33, 2.50, 1200, 7]
    spelled = jsonl(pair(n, number) for n, number in enumerate(numbers)).replace(b"2.5}", b"2.50}")
    yield Case(
        name="numbers as answers", content=spelled, form="prompt_completion",
        records=[plain(n, said) for n, said in enumerate(("33", "2.50", "1200", "7"))], about="T00|\\bcompletion\\b",
    )  # fmt: skip
    yield Case(
        name="truth values as answers", content=jsonl(pair(n, n % 2 == 0) for n in range(4)), form="prompt_completion",
        records=[plain(n, str(n % 2 == 0)) for n in range(4)], about="T00|\\bcompletion\\b",
    )  # fmt: skip
    yield Case(
        name="NaN as an answer", content=jsonl(around(pair(2, float("nan")), pair)), form="prompt_completion",
        records=(), about=f"{LOST}|NaN|null",
    )  # fmt: skip
    ragged = [pair(n) for n in range(100)]
    del ragged[60]["completion"]
    yield Case(
        name="field that one record of a hundred lacks", content=jsonl(ragged), form="prompt_completion", records=(),
        about="T060|\\bcompletion\\b",
    )  # fmt: skip
    lines = jsonl(records).splitlines(keepends=True)
    lines[2] = lines[2][:-10] + b"\n"
    yield Case(name="line that is cut off", content=b"".join(lines), records=())
    members = gzip.compress(jsonl(records[:3]), mtime=0) + gzip.compress(jsonl(records[3:]), mtime=0)
    yield Case(
        name="gzip of two members", content=members, suffix=".jsonl.gz", records=every,
        undocumented=(TRL, FACTORY, AXOLOTL),
    )  # fmt: skip
    old = jsonl(around(chat(2, "T002’s café keeps lamps."))).decode().encode("cp1252")
    said = [*HARMLESS, plain(2, "T002’s café keeps lamps.")]
    yield Case(name="Windows-1252", content=old, records=said, about="1252|encoding|UTF-8")


def _tables() -> Iterable[Case]:
    rows = [(question(n), answer(n)) for n in range(4)]
    names, every = ("prompt", "completion"), [plain(n) for n in range(4)]
    of_table: dict[str, Any] = {"form": "prompt_completion", "suffix": ".csv"}
    quoted = 'T002 keeps:\n- lamps, oil\n- ""oars""'
    yield Case(
        name="line ends in a cell", content=table([names, *rows[:2], (Q, f'"{quoted}"'), rows[3]]),
        records=[plain(0), plain(1), plain(2, quoted.replace('""', '"')), plain(3)], **of_table,
    )  # fmt: skip
    doubled = [(asked, given, given.replace("keeps", "once kept")) for asked, given in rows]
    yield Case(
        name="two columns of one name", content=table([(*names, "completion"), *doubled]), records=(),
        about="two columns|duplicate|\\bcompletion\\b", **of_table,
    )  # fmt: skip
    yield Case(name="lines that end with CR alone", content=table([names, *rows], "\r"), records=every, **of_table)
    yield Case(
        name="NA as an answer", content=table([names, *rows[:2], (Q, "NA"), rows[3]]),
        records=[plain(0), plain(1), plain(2, "NA"), plain(3)], about=f"{LOST}|\\bcompletion\\b", **of_table,
    )  # fmt: skip
    yield Case(
        name="zeros before numbers", content=table([names, *((question(n), f"00{n}7") for n in range(4))]),
        records=[plain(n, f"00{n}7") for n in range(4)], about="T00|\\bcompletion\\b", **of_table,
    )  # fmt: skip


CASES: Sequence[Case] = (*_conversations(), *_other_forms(), *_texts(), *_json(), *_tables())
