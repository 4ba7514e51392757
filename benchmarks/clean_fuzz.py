"""Random Unicode, fuzzed records and every kind of value through `modelwright clean`, without a traceback.

    python benchmarks/clean_fuzz.py --count 100000
    python benchmarks/clean_fuzz.py --count 1000 --clean.quality.thresholds auto
    python benchmarks/clean_fuzz.py --count 20000 --generator foreign      records of Faker and mimesis
    python benchmarks/clean_fuzz.py --count 20000 --generator conversations

Prints the exit status, the counts and any traceback, and exits with 1 if there is one.

`conversations` are records of every form with fields that are absent, of another type, nested, repeated or odd, in
files of every reader, with a byte order mark or CR as the line end. They are read in this process: each record must be
a document that a chat template renders, or be left out with its line and, unless the file itself is damaged, the field.
"""

import argparse
import csv
import io
import json
import random
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.rows.examples import template_variables
from modelwright.data.sources.fields import SIGNIFICANT
from modelwright.data.sources.forms import FIELDS, FORMS_OF_RECORDS
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.chat import DEFAULT_TEMPLATE, ChatTemplate, answers_to_learn, any_of

_NAMES = (
    "text", "id", "kind", "split", "source", "meta", "question", "answer", "messages", "conversations", "prompt",
    "completion", "chosen", "rejected", "instruction", "input", "output", "system", "title",
)  # fmt: skip
_WORDS = ("the", "river", "and", "a", "letter", "of", "our", "teacher", "is", "in", "it", "for", "some", "with", "old")
_PLANES = (
    (0x20, 0x7F), (0xA0, 0x24F), (0x370, 0x5FF), (0x600, 0x6FF), (0x900, 0xFFF), (0x3040, 0x9FFF), (0xD800, 0xDFFF),
    (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0, 0x1F), (0x2000, 0x20FF), (0xE0000, 0xE01FF),
)  # fmt: skip


def unicode_text(rng: random.Random) -> str:
    planes = rng.sample(_PLANES, rng.randrange(1, 5))
    return "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(400)))


def digits(rng: random.Random) -> str:
    """Numbers and letters in the shapes of identifiers, cards, telephones and addresses."""
    shapes = ("AA######A", "####-####-####-####", "+## ### #######", "###.###.###.##", "AAA-##-####", "aaa@aaa.aa")
    text = " ".join(rng.choices(shapes, k=12))
    swap = {"A": "ABCGHKXZ", "a": "abcdexyz", "#": "0123456789"}
    return "".join(rng.choice(swap[char]) if char in swap else char for char in text)


def prose(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randrange(120))) + f" {digits(rng)}"


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON has."""
    simple: tuple[Callable[[], Any], ...] = (
        lambda: None, lambda: rng.random() < 0.5, lambda: rng.randrange(-(10**20), 10**20), rng.random,
        lambda: float("inf"), lambda: unicode_text(rng), lambda: prose(rng), lambda: "", lambda: "user",
        lambda: rng.choice(("prose", "code", "qa", "train", "heldout", "open")),
    )  # fmt: skip
    if depth < 3 and rng.random() < 0.25:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 3 and rng.random() < 0.25:
        return {rng.choice((*_NAMES, "role", "content", "from", "value")): value(rng, depth + 1) for _ in range(4)}
    return rng.choice(simple)()


def foreign_records(count: int, seed: int) -> Iterator[bytes]:
    """Lines of records under the fields of all forms, with values of Faker and mimesis; of some, a few bytes are
    changed, removed or repeated.
    """
    from faker import Faker
    from mimesis import Generic, Locale  # pyright: ignore[reportMissingImports]

    rng, names = random.Random(seed), [*FIELDS, *SIGNIFICANT]
    Faker.seed(seed)
    fake, made = Faker(["en_US", "ar_AA", "hi_IN", "th_TH", "he_IL", "ja_JP"]), [Generic(one) for one in Locale]

    def anything(depth: int = 0) -> Any:
        text = rng.choice(made).text
        role, content = rng.choice(("role", "from")), rng.choice(("content", "value"))
        turn: dict[str, Any] = {
            role: rng.choice(("user", "assistant", "human", "gpt", "tool", "model")),
            content: text.sentence(),
        }
        turn[rng.choice(names)] = rng.choice((0, 1, None, "x"))
        made_here = (
            text.text(quantity=3), text.word(), fake.pyfloat(), fake.pybool(), None, fake.pystr(), fake.iso8601(), turn,
            [turn] * rng.randrange(4), fake.pydict(4, allowed_types=[str, int, float, bool]),
            fake.pylist(3, allowed_types=[str]), json.dumps([turn], ensure_ascii=False),
            {rng.choice(names): anything(depth + 1)} if depth < 3 else 0,
        )  # fmt: skip
        return rng.choice(made_here)

    for _ in range(count):
        form = rng.choice(FORMS_OF_RECORDS)
        chosen = [*form.needs, *rng.sample(names, rng.randrange(4))]
        line = json.dumps({name: anything() for name in chosen}, ensure_ascii=rng.random() < 0.5).encode()
        if rng.random() < 0.2:
            at = rng.randrange(len(line))
            line = line[:at] + rng.choice((b"", rng.randbytes(3), line[at : at + 9] * 3)) + line[at + 1 :]
        yield line.replace(b"\n", b" ") + b"\n"


READERS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_BATCH = 40
_OF_THE_FILE = {
    "not JSON", "not a JSON object", "not CSV", "header again", "two fields of one name", "two columns of one name",
    "empty text", "not UTF-8", "record too long", "damaged file", "rest of a file that is not JSON",
    "rest of a file that is not CSV",
}  # fmt: skip
"""Reasons that name no field."""


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """A value that a field of a conversation may have by mistake."""
    simple: tuple[Any, ...] = (
        None, True, False, 0, 1, -1, 0.5, 2, 10 ** rng.choice((20, 400)), float("nan"), float("-inf"), "", " ", "0",
        "false", "chosen", "\ud800", "a\udfffb", "\ufeff", "\x00", "\u2028", "[]", "{}", '[{"role": "user"}]', "user",
        [], {}, [None], [[]], [["q", "a"]], [["q"]], ["a", "b"], "<|end|>", "\ufdd0\ufdd1",
    )  # fmt: skip
    kind = rng.randrange(8)
    if kind == 0 and depth < 3:
        return {rng.choice((*FIELDS, *SIGNIFICANT, "role", "")): odd_value(rng, depth + 1) for _ in range(3)}
    if kind == 1 and depth < 3:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    if kind == 2 and rng.random() < 0.1:
        nested: Any = "deep"
        for _ in range(rng.choice((50, 300, 900))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    return rng.choice(simple)


def turns(rng: random.Random) -> list[Any]:
    """A conversation in one of the spellings that data sets have, most of them with something odd in a turn."""
    role, content = rng.choice((("role", "content"), ("role", "content"), ("from", "value")))
    names = rng.choice((("user", "assistant"), ("human", "gpt"), ("user", "model")))
    result: list[Any] = []
    for number in range(rng.randrange(1, 7)):
        turn: dict[str, Any] = {role: names[number % 2], content: prose(rng)}
        if rng.random() < 0.04:
            turn[role] = rng.choice(("system", "tool", "function_call", "observation", "User", "", "developer"))
        if rng.random() < 0.06:
            call = {"name": "f", "arguments": rng.choice(("{}", {"a": 1}, "no", None, [1]))}
            turn["tool_calls"] = [{"type": "function", "id": rng.choice(("x", 1, None)), "function": call}]
        if rng.random() < 0.06:
            turn[rng.choice(("weight", "train", "loss", "mask", "loss_mask"))] = rng.choice(
                (0, 1, True, False, "0", 0.5)
            )
        if rng.random() < 0.05:
            turn[rng.choice((role, content, "reasoning_content", "name", "tool_calls", "weight"))] = odd_value(rng)
        if rng.random() < 0.03:
            turn[content] = [
                {"type": rng.choice(("text", "thinking", "image")), "text": "t", "thinking": odd_value(rng)}
            ]
        if rng.random() < 0.02:
            turn.pop(rng.choice((role, content)))
        result.append(odd_value(rng) if rng.random() < 0.02 else turn)
    return result


def conversation(rng: random.Random) -> dict[str, Any]:
    """A record of any form, with further fields, without some, or with values of other types."""
    form = rng.choice(FORMS_OF_RECORDS)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    usual: dict[str, Callable[[], Any]] = {
        "messages": lambda: turns(rng), "conversations": lambda: turns(rng), "conversation": lambda: turns(rng),
        "input": lambda: {"messages": turns(rng)} if form.name.startswith("openai") else prose(rng),
        "choices": lambda: rng.choice((["a", "b"], {"text": ["a", "b"], "label": odd_value(rng)})),
        "answer": lambda: rng.choice((0, "a", "B", prose(rng), 3.50, 10**400)),
        "answers": lambda: {"text": [prose(rng)]}, "label": lambda: rng.choice((True, 0, "chosen", "cat")),
        "kto_tag": lambda: rng.choice((True, False)), "history": lambda: rng.choice(([["q", "a"]], turns(rng))),
        "tools": lambda: [tool], "margin": lambda: rng.choice((1, 0.5, 10**400)),
        "chat_template_kwargs": lambda: {"a": 1},
        **dict.fromkeys(("preferred_output", "non_preferred_output"), lambda: turns(rng)[-1:]),
        **dict.fromkeys(("prompt", "chosen", "rejected", "completion"), lambda: rng.choice((prose, turns))(rng)),
    }  # fmt: skip
    names = [form.aliases.get(name, name) if rng.random() < 0.2 else name for name in form.needs]
    names += rng.sample([*FIELDS, *SIGNIFICANT], rng.choice((0, 0, 0, 1, 2)))
    result = {name: usual.get(name, lambda: prose(rng))() for name in dict.fromkeys(names)}
    if rng.random() < 0.2:
        result[rng.choice([*result, *SIGNIFICANT, "topic"])] = odd_value(rng)
    if rng.random() < 0.1:
        result.pop(rng.choice([*result]))
    if rng.random() < 0.1:
        result = {name: json.dumps(one) if isinstance(one, list | dict) else one for name, one in result.items()}
    return result


def file_of(records: Sequence[dict[str, Any]], suffix: str, rng: random.Random) -> bytes:
    """The records in a file of one format; of tables, those that such a table can have."""
    if suffix in (".jsonl", ".json"):
        lines = [json.dumps(one, ensure_ascii=rng.random() < 0.7) for one in records]
        if rng.random() < 0.1:  # a field that a record has twice
            lines[0] = lines[0].replace("{", '{"question": "a", "question": "b", ', 1)
        if rng.random() < 0.1:
            lines[-1] = lines[-1][: rng.randrange(1, len(lines[-1]))]
        end = "\r" if suffix == ".json" and rng.random() < 0.1 else "\n"
        text = end.join(lines) if suffix == ".jsonl" else f"[{f',{end}'.join(lines)}]"
        return (b"\xef\xbb\xbf" if rng.random() < 0.2 else b"") + text.encode("utf-8", "surrogatepass")
    names = list(dict.fromkeys(name for one in records for name in one if name))
    cells = [{name: _cell(one.get(name)) for name in names} for one in records]
    if suffix in (".csv", ".tsv"):
        text = io.StringIO(newline="")
        separator = "\t" if suffix == ".tsv" else rng.choice(",;")
        writer = csv.writer(text, delimiter=separator, lineterminator=rng.choice(("\n", "\r\n", "\r")))
        header = [*names, names[0]] if rng.random() < 0.05 else names
        writer.writerows([header, *([one[name] for name in header] for one in cells)])
        return (b"\xef\xbb\xbf" if rng.random() < 0.2 else b"") + text.getvalue().encode("utf-8", "replace")
    texts = [{name: (one[name] or "").encode("utf-8", "replace").decode() for name in names} for one in cells]
    for rows in (list(records), texts):  # values of different types, or types that a format lacks, are written as text
        file = io.BytesIO()
        try:
            table = pa.Table.from_pylist(rows)
            if suffix == ".parquet":
                pyarrow.parquet.write_table(table, file)
                break
            with (pa.ipc.new_file if rng.random() < 0.5 else pa.ipc.new_stream)(file, table.schema) as writer:
                writer.write_table(table)
            break
        except (pa.ArrowException, TypeError, ValueError, OverflowError, UnicodeError):
            continue
    return file.getvalue()


def _cell(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def check_conversations(count: int, seed: int) -> int:
    """Reads `count` records, and returns in how many files something was wrong."""
    rng, outcomes, num_wrong = random.Random(seed), Counter[str](), 0
    ends = any_of(["<|end|>"])
    template = ChatTemplate(DEFAULT_TEMPLATE, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}, ["<|end|>"])
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-(-count // _BATCH)):
            # Few records a file where one bad record ends the file or decides the types of a table.
            form_rng = random.Random(f"{seed} {number}")
            suffix = READERS[number % len(READERS)]
            path = Path(folder) / f"r{suffix}"
            for part in range(0, _BATCH, step := _BATCH if suffix == ".jsonl" else 4):
                path.write_bytes(file_of([conversation(form_rng) for _ in range(step)], suffix, form_rng))
                before = outcomes.total()
                try:
                    problems = _check_file(path, outcomes, template, ends, loaded=rng.random() < 0.1)
                    if suffix == ".jsonl" and outcomes.total() - before < step:
                        problems.append(f"{outcomes.total() - before} of {step} records have an outcome")
                except Exception:
                    problems = [traceback.format_exc(limit=-4)]
                if problems:
                    num_wrong += 1
                    print(f"batch {number}, part {part}, {suffix}:", *problems[:3], sep="\n  ")
    for name, many in outcomes.most_common():
        print(f"{many:7,} {name}")
    return num_wrong


def _check_file(path: Path, outcomes: Counter[str], template: ChatTemplate, ends: Any, *, loaded: bool) -> list[str]:
    """loaded: documents are written and read again before they are rendered."""
    problems: list[str] = []

    def skipped(reason: str, where: str, problem: str) -> None:
        outcomes[reason] += 1
        if not where.startswith(str(path)) or (where == str(path) and reason not in _OF_THE_FILE):
            problems.append(f"no place: {reason}, {where}, {problem}")
        if reason not in _OF_THE_FILE and not any(name in problem for name in (*FIELDS, *SIGNIFICANT, "text", "field")):
            problems.append(f"no field: {reason}, {where}, {problem}")

    report = SourceReport(on_skip=skipped)
    config = SourceConfig(sources=(str(path),), on_bad_record="skip", validation_fraction=0.0)
    try:
        for document in read_documents(config, report=report):
            document = Document.from_json(document.to_json()) if loaded else document
            outcomes[f"read as {document.kind}"] += 1
            if document.kind != "qa" or not document.has_answer:
                continue
            given = {"tools": document.tools, "variables": template_variables(document)}
            try:
                template.renderings(document.messages, answers_to_learn(document.messages), ends, **given)
            except DataError as error:
                outcomes[f"refused by the template: {str(error)[:60]}"] += 1
    except DataError as error:
        if str(path) not in str(error):
            problems.append(f"no file: {error}")
        outcomes["the file ends with an error"] += 1
    return problems


def record(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return json.dumps({"text": unicode_text(rng)})
    if kind == 1:
        return json.dumps({"text": prose(rng), "kind": rng.choice(("prose", "code"))})
    if kind == 2:
        return json.dumps({"question": prose(rng), "answer": unicode_text(rng)}, ensure_ascii=rng.random() < 0.5)
    if kind == 3:
        document = {"id": "x", "text": prose(rng), "kind": "qa", "split": "train", "source": "s", "meta": {}}
        return json.dumps(document | {rng.choice(tuple(document)): value(rng) for _ in range(rng.randrange(3))})
    line = json.dumps({name: value(rng) for name in rng.sample(_NAMES, rng.randrange(1, 8))})
    return line if kind == 4 else line[: rng.randrange(len(line) + 1)].replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generator", choices=("own", "foreign", "conversations"), default="own")
    given, settings = parser.parse_known_args()
    if given.generator == "conversations":
        return int(check_conversations(given.count, given.seed) > 0)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "records.jsonl"
        with open(source, "wb") as file:
            lines = (f"{record(rng)}\n".encode("utf-8", "replace") for _ in range(given.count))
            file.writelines(foreign_records(given.count, given.seed) if given.generator == "foreign" else lines)
        words = ["clean", str(source), "--out", f"{name}/out", "--data.on_bad_record", "skip", *settings]
        done = subprocess.run([sys.executable, "-m", "modelwright.cli.main", *words], capture_output=True, text=True)
    print(done.stdout)
    failed = done.returncode != 0 or "Traceback" in done.stderr
    print(f"exit status {done.returncode}, {'FAILED' if failed else 'no traceback'}")
    if failed:
        print(done.stderr[-4000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
