"""Recall and precision of finding personal data, by kind, and documents per CPU-second; presidio beside it.

    python benchmarks/personal_data.py                                  the test half of the labeled set
    python benchmarks/personal_data.py --half development               what the patterns are tuned on
    python benchmarks/personal_data.py --set foreign                    made by other packages (pip install mimesis)
    python benchmarks/personal_data.py --misses 40                      print values and alarms that were wrong
    python benchmarks/personal_data.py --presidio ENV/bin/python        presidio in an environment of its own
    python benchmarks/personal_data.py --real FOLDER ... --misses 200   alarms in real text, to look at

The environment: `python -m venv ENV && ENV/bin/pip install presidio-analyzer faker`. Presidio runs with a blank spaCy
model, so that its patterns are measured and no model is needed; it has no patterns for credentials and secrets.

A value counts as found if a finding of its kind covers at least four fifths of it, and a finding as right if it
overlaps a value of its kind.
"""

import argparse
import contextlib
import gzip
import inspect
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

Span = tuple[str, int, int]
KINDS = ("email", "phone", "ip", "card", "iban", "national_id", "credentials", "secret")
_PRESIDIO_FORMS = ("presidio", "presidio, every country")
_COVERED = 0.8
_SUFFIXES = {".py", ".rst", ".txt", ".md", ".c", ".h", ".html", ".cpp", ".gz", ""}
_FEWEST_CHARS, _MOST_CHARS = 200, 20_000
_MOST_FILES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("development", "test"), default="test")
    parser.add_argument("--set", choices=("own", "foreign"), default="own")
    parser.add_argument("--per-kind", type=int, default=400)
    parser.add_argument("--negatives", type=int, default=2400)
    parser.add_argument("--presidio", type=Path, help="Python of an environment with presidio-analyzer")
    parser.add_argument("--misses", type=int, default=0)
    parser.add_argument("--real", type=Path, nargs="+", default=[])
    parser.add_argument("--presidio-worker", choices=_PRESIDIO_FORMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.presidio_worker:
        presidio_worker(given.presidio_worker == _PRESIDIO_FORMS[1])
    elif given.real:
        show_alarms_in(given.real, given.misses)
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    from personal_data_set import labeled, negatives

    if given.set == "foreign":
        import foreign_personal_data as foreign

        examples = foreign.labeled(per_kind=given.per_kind) + foreign.negatives(count=given.negatives)
    else:
        examples = labeled(given.half, per_kind=given.per_kind) + negatives(given.half, count=given.negatives)
    random.Random(0).shuffle(examples)
    texts, codes = [example.text for example in examples], [example.is_code for example in examples]
    labels = [example.values for example in examples]
    found, speed = run_modelwright(texts, codes)
    num_values = sum(map(len, labels))
    name = "foreign set" if given.set == "foreign" else f"{given.half} half"
    print(f"{name}: {num_values} values, {given.negatives} texts without any\n")
    columns = {"modelwright": score(labels, found)}
    speeds = {"modelwright": speed}
    for form in _PRESIDIO_FORMS if given.presidio else ():
        found_by_presidio, speeds[form] = run_presidio(given.presidio, form, texts)
        columns[form] = score(labels, found_by_presidio)
    print(table(columns))
    for name, value in speeds.items():
        print(f"{name}: {value:,.0f} documents per CPU-second; modelwright is {speed / value:.1f} times as fast")
    for line in wrong(texts, labels, found)[: given.misses]:
        print(line)


Scores = dict[str, tuple[float, float]]


def score(labels: Sequence[Sequence[Span]], found: Sequence[Sequence[Span]]) -> Scores:
    """Recall and precision by kind, of all kinds, and of those that both tools know."""
    counts = Counter[tuple[str, str]]()
    for values, findings in zip(labels, found, strict=True):
        for kind, start, end in values:
            counts[kind, "values"] += 1
            counts[kind, "found"] += any(is_found((kind, start, end), finding) for finding in findings)
        for finding in findings:
            counts[finding[0], "findings"] += 1
            counts[finding[0], "right"] += any(overlaps(finding, value) for value in values)
    groups = {kind: (kind,) for kind in KINDS} | {"all": KINDS, "without keys": KINDS[:6]}
    result: Scores = {}
    for name, kinds in groups.items():
        values, hits, findings, right = (
            sum(counts[kind, what] for kind in kinds) for what in ("values", "found", "findings", "right")
        )
        result[name] = (hits / max(1, values), right / max(1, findings))
    return result


def is_found(value: Span, finding: Span) -> bool:
    kind, start, end = value
    covered = min(end, finding[2]) - max(start, finding[1])
    return finding[0] == kind and covered >= _COVERED * (end - start)


def overlaps(finding: Span, value: Span) -> bool:
    return finding[0] == value[0] and finding[1] < value[2] and value[1] < finding[2]


def table(columns: dict[str, Scores]) -> str:
    header = "| kind |" + "".join(f" {name} recall | {name} precision |" for name in columns)
    lines = [header, "| --- |" + " --- | --- |" * len(columns)]
    for kind in next(iter(columns.values())):
        cells = "".join(f" {scores[kind][0]:.3f} | {scores[kind][1]:.3f} |" for scores in columns.values())
        lines.append(f"| {kind} |{cells}")
    return "\n".join(lines)


def wrong(texts: Sequence[str], labels: Sequence[Sequence[Span]], found: Sequence[Sequence[Span]]) -> list[str]:
    """Lines on values that were missed and findings that are none."""
    lines: list[str] = []
    for text, values, findings in zip(texts, labels, found, strict=True):
        missed = [value for value in values if not any(is_found(value, finding) for finding in findings)]
        alarms = [finding for finding in findings if not any(overlaps(finding, value) for value in values)]
        lines += [f"missed {kind}: {text[start:end]!r} in {text!r}" for kind, start, end in missed]
        lines += [f"alarm {kind}: {text[start:end]!r} in {text!r}" for kind, start, end in alarms]
    return sorted(lines)


def run_modelwright(texts: Sequence[str], codes: Sequence[bool]) -> tuple[list[list[Span]], float]:
    from modelwright.data.clean.steps.privacy import PrivacyConfig, find

    config = PrivacyConfig()
    failures = Counter[str]()

    def search(text: str, is_code: bool) -> list[Span]:
        findings = find(text, config.replace, is_code=is_code, regions=config.phone_regions, failures=failures)
        return [(finding.kind, finding.start, finding.end) for finding in findings]

    search(texts[0], False)
    result, speed = timed(lambda: [search(text, code) for text, code in zip(texts, codes, strict=True)], len(texts))
    assert not failures, failures
    return result, speed


def timed(work: Callable[[], list[list[Span]]], count: int) -> tuple[list[list[Span]], float]:
    start = time.process_time()
    result = work()
    return result, count / (time.process_time() - start)


def run_presidio(python: Path, form: str, texts: Sequence[str]) -> tuple[list[list[Span]], float]:
    command = [str(python), __file__, "--presidio-worker", form]
    done = subprocess.run(command, input=json.dumps(list(texts)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    answer = json.loads(done.stdout.splitlines()[-1])
    return [[(kind, start, end) for kind, start, end in spans] for spans in answer["found"]], answer["speed"]


_PRESIDIO_KINDS = {
    "EMAIL_ADDRESS": "email", "PHONE_NUMBER": "phone", "IP_ADDRESS": "ip", "CREDIT_CARD": "card", "IBAN_CODE": "iban",
}  # fmt: skip
_PRESIDIO_OTHERS = {
    "URL",
    "DATE_TIME",
    "CRYPTO",
    "PERSON",
    "LOCATION",
    "NRP",
    "MEDICAL_LICENSE",
    "MAC_ADDRESS",
    "ORGANIZATION",
}
"""Entities that are no kind of this set; every other one is a national number."""


def presidio_worker(every_country: bool) -> None:
    """Runs in presidio's environment: texts on standard input, findings on standard output.

    every_country: with all its recognizers, and not only those that it has for English texts.
    """
    presidio = import_module("presidio_analyzer")
    predefined = import_module("presidio_analyzer.predefined_recognizers")
    engine = import_module("presidio_analyzer.nlp_engine").SpacyNlpEngine()
    engine.nlp = {"en": import_module("spacy").blank("en")}
    registry = presidio.RecognizerRegistry(supported_languages=["en"])
    if every_country:
        for name, cls in inspect.getmembers(predefined, inspect.isclass):
            if issubclass(cls, presidio.PatternRecognizer) or name == "PhoneRecognizer":
                with contextlib.suppress(TypeError):  # some need a service
                    registry.add_recognizer(cls(supported_language="en"))  # pyright: ignore[reportCallIssue]
    else:
        registry.load_predefined_recognizers(languages=["en"], nlp_engine=engine)
        registry.recognizers = [found for found in registry.recognizers if found.name != "SpacyRecognizer"]
    analyzer = presidio.AnalyzerEngine(registry=registry, nlp_engine=engine, supported_languages=["en"])
    texts = json.load(sys.stdin)

    def search(text: str) -> list[Span]:
        results = analyzer.analyze(text, language="en", score_threshold=0.4)
        kinds = [(_PRESIDIO_KINDS.get(r.entity_type, "national_id"), r) for r in results]
        return [(kind, r.start, r.end) for kind, r in kinds if r.entity_type not in _PRESIDIO_OTHERS]

    search(texts[0])
    found, speed = timed(lambda: [search(text) for text in texts], len(texts))
    print(json.dumps({"found": found, "speed": speed}))


def show_alarms_in(folders: Sequence[Path], most: int) -> None:
    """All findings in real text with what stands around them, a random sample of each kind; counts by kind."""
    from personal_data_set import Example

    examples: list[tuple[str, Example]] = []
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    for path in random.Random(0).sample(paths, min(_MOST_FILES, len(paths))):
        if path.suffix in _SUFFIXES:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                text = file.read(_MOST_CHARS).decode("utf-8", "ignore")
            if "\x00" not in text and len(text) >= _FEWEST_CHARS:
                examples.append((str(path), Example(text, path.suffix in {".py", ".c", ".h", ".cpp"}, ())))
    texts = [example.text for _, example in examples]
    found, speed = run_modelwright(texts, [example.is_code for _, example in examples])
    counts = Counter(kind for spans in found for kind, _, _ in spans)
    print(f"{len(texts)} files, {speed:,.0f} per CPU-second, findings: {dict(counts)}")
    shown, seen = Counter[str](), set[tuple[str, str]]()
    for (path, example), spans in zip(examples, found, strict=True):
        for kind, start, end in spans:
            if (kind, example.text[start:end]) in seen:
                continue
            seen.add((kind, example.text[start:end]))
            shown[kind] += 1
            if shown[kind] <= most:
                before, after = example.text[max(0, start - 40) : start], example.text[end : end + 20]
                near = f"{before}[[{example.text[start:end]}]]{after}"
                print(f"{kind}: {near!r}  {path}")


if __name__ == "__main__":
    main()
