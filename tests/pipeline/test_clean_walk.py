"""Cleaning as a new user meets it: look, change one limit as printed, clean again, run on the result."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.clean.steps.noise import FEWEST_SAMPLES, NoiseConfig, read_trusted

Command = Callable[..., subprocess.CompletedProcess[str]]
NOUNS = ("river", "letter", "market", "garden", "window", "teacher", "harbor", "winter", "engine", "village")
VERBS = ("crosses", "describes", "opens", "repairs", "remembers", "follows", "paints", "measures", "hides", "sells")
FRENCH = "Le facteur est venu ce matin avec une lettre pour la dame qui habite dans la maison au bout du village. "


def sentences(start: int, count: int) -> str:
    """Sentences that no other start gives."""
    result = []
    for number in range(start, start + count):
        a, b, c, d = NOUNS[number % 10], VERBS[number // 10 % 10], NOUNS[number // 100 % 10], NOUNS[number * 7 % 10]
        result.append(f"The {a} of the {c} {b} what it was told about number {number} by the {d}.")
    return " ".join(result)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fourteen files of every kind a folder may have."""
    notes = tmp_path / "my notes"
    notes.mkdir()
    for number in range(5):
        (notes / f"note{number}.txt").write_text(sentences(1000 * number, 30))
    (notes / "page.md").write_text("# A page\n\n" + sentences(20_000, 20))
    (notes / "code.py").write_text("".join(f"def add_{n}(a, b):\n    return a + b + {n}\n\n\n" for n in range(20)))
    pairs = [{"question": f"What is {n} and {n + 1}?", "answer": f"The sum is {2 * n + 1}."} for n in range(40)]
    (notes / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    texts = [{"text": sentences(30_000 + 50 * n, 9)} for n in range(40)]
    (notes / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (notes / "table.csv").write_text("text\n" + "\n".join(sentences(60_000 + 50 * n, 8) for n in range(20)))
    (notes / "french.txt").write_text(FRENCH * 3 + "Écrivez à jeanne.moreau@example.org pour la suite.")
    sums = [f"the {NOUNS[n % 10]} has {n * 7919 + 10**19}" for n in range(200)]
    (notes / "numbers.txt").write_text("The sums: " + " ".join(sums))
    (notes / "copy.txt").write_text(sentences(0, 30))
    (notes / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    return notes


def test_clean_look_change_a_limit_and_run(folder: Path, tmp_path: Path, inside: Command) -> None:
    out = tmp_path / "cleaned notes"
    words = ("clean", str(folder), "--out", str(out), "--clean.quality.languages", "en")
    done = inside(*words)
    assert done.returncode == 0, done.stderr
    dropped = {Path(entry.document.source).name: entry for entry in read_dropped(out)}
    assert (dropped["french.txt"].reason, dropped["numbers.txt"].reason) == ("other language", "many digits")
    assert "jeanne.moreau" not in dropped["french.txt"].document.text
    (printed,) = re.findall(r"many digits \(keep it with (.*?)\)", done.stdout)
    again = inside(*words, *shlex.split(printed))
    assert again.returncode == 0, again.stderr
    assert "holds the result of other settings, which is replaced: clean.quality.limits" in again.stderr
    assert "numbers.txt" not in {Path(entry.document.source).name for entry in read_dropped(out)}

    (printed,) = re.findall(r"train on it: modelwright (.*)", again.stdout)
    assert printed.startswith("run quickstart --name mine "), "without a name it would go on with another run"
    *_, sources = shlex.split(printed)
    run = tmp_path / "run"
    small = ["--stages", "clean", "--run-dir", str(run), *shlex.split(printed)[2:]]
    done = inside("run", "tiny", *small)
    assert done.returncode == 0, done.stderr
    kept = list(read_kept(run / "clean" / "artifact"))
    assert {entry.split for entry in kept} == {"train", "heldout"}
    assert {entry.split for entry in kept if entry.kind == "qa"} == {"train", "heldout"}
    texts = {entry.text for entry in kept}
    assert not texts & {entry.document.text for entry in read_dropped(out) if entry.step != "duplicates"}
    assert texts <= {entry.text for entry in read_kept(out)}
    assert sources == str(out)


def test_questions_alone_are_for_fine_tuning(tmp_path: Path, inside: Command) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"question": "What is one and two?", "answer": "Three."}) + "\n")
    done = inside("clean", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "clean"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("fine-tune a model on it: modelwright finetune MODEL ")


@pytest.mark.slow
def test_the_run_on_the_result_has_figures_of_held_out_text(
    corpus: Path, tmp_path: Path, inside: Command, small_words: tuple[str, ...]
) -> None:
    out = tmp_path / "cleaned"
    assert inside("clean", str(corpus), "--out", str(out)).returncode == 0
    assert {entry.split for entry in read_kept(out)} == {"open"}
    words = [str(out) if word == str(corpus) else word for word in small_words]
    stages = "clean,tokenize,pack,pretrain,evaluate,report"
    done = inside(*words, "--run-dir", str(tmp_path / "run"), "--stages", stages)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "evaluate" / "artifact" / "results.json").read_text())
    assert "bits_per_byte" in json.dumps(results)
    assert "bits per byte" in (tmp_path / "run" / "report.html").read_text().lower()


def test_a_run_that_holds_nothing_out_says_so(folder: Path, tmp_path: Path, inside: Command) -> None:
    words = ("--stages", "clean", "--run-dir", str(tmp_path / "run"), "--data.validation_fraction", "0")
    done = inside("run", "tiny", "--data.sources", str(folder / "texts.jsonl"), *words)
    assert done.returncode == 0
    assert "no document is held out, so this run has no validation loss" in done.stderr


def test_a_split_in_the_record_is_kept(tmp_path: Path, inside: Command) -> None:
    record = {"id": "a", "kind": "prose", "source": "s", "meta": {}}
    lines = [record | {"text": sentences(0, 9), "split": "heldout"}, record | {"id": "b", "text": sentences(99, 9)}]
    lines += [record | {"text": sentences(300, 9), "split": 7}, {"text": sentences(400, 9), "meta": 3, "id": 1}]
    source = tmp_path / "records.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    assert inside("clean", str(source), "--out", str(tmp_path / "out")).returncode == 0
    assert [entry.split for entry in read_kept(tmp_path / "out")] == ["heldout", "open", "open", "open"]


@pytest.mark.parametrize("place", ["", "inner", "link"])
def test_no_result_inside_of_its_sources(folder: Path, tmp_path: Path, inside: Command, place: str) -> None:
    (tmp_path / "link").symlink_to(folder)
    out = tmp_path / "link" if place == "link" else folder / place
    done = inside("clean", str(folder), "--out", str(out))
    assert (done.returncode, list(folder.glob("kept*"))) == (2, [])
    assert "lies in the source" in done.stderr
    assert "choose a folder outside of the sources" in done.stderr
    good = tmp_path / "good"
    assert inside("clean", str(folder), "--out", str(good)).returncode == 0
    assert "holds the source" in inside("clean", str(good / "kept-*.jsonl.zst"), "--out", str(good)).stderr


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("{file}", "is a file, not a folder"),
        ("{file}/deeper", "lies below"),
        ("x" * 300, "is not a usable path"),
        ("gs://bucket/cleaned", "gs://bucket/cleaned needs a package: Please install gcsfs"),
    ],
)
def test_an_impossible_folder(folder: Path, inside: Command, out: str, problem: str) -> None:
    done = inside("clean", str(folder), "--out", out.format(file=folder / "note0.txt"))
    assert done.returncode == 2
    assert problem in done.stderr
    assert "--out: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("gs:").exists()


def test_bad_records_stop_it_as_they_stop_a_run(tmp_path: Path, inside: Command) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text('{"no": "text"}\nbroken\n')
    done = inside("clean", str(source), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "records.jsonl:1: has no field 'text'" in done.stderr
    done = inside("clean", str(source), "--out", str(tmp_path / "out"), "--data.on_bad_record", "skip")
    assert done.returncode == 2
    assert "none of the records could be read (1 no text field, 1 not JSON)" in done.stderr


def test_a_trial_shows_drops_and_writes_nothing(folder: Path, tmp_path: Path, inside: Command) -> None:
    before = sorted(tmp_path.rglob("*"))
    index = tmp_path / "index"
    words = ("--clean.quality.languages", "en", "--clean.duplicates.index", str(index))
    done = inside("clean", str(folder), "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    assert "quality: many digits" in done.stdout
    assert "numbers.txt:1: digit_fraction 0." in done.stdout
    assert "    The sums: the river has 1000000" in done.stdout
    assert "keep it with --clean.quality.limits.prose.max_digit_fraction" in done.stdout
    assert "jeanne.moreau" not in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [["[en]"], ["[en,", "de]"], ["en"]])
def test_languages_are_lists_and_checked(folder: Path, tmp_path: Path, inside: Command, words: list[str]) -> None:
    source = str(folder / "texts.jsonl")
    done = inside("clean", source, "--out", str(tmp_path / "out"), "--clean.quality.languages", *words)
    assert done.returncode == 0, done.stderr
    assert len(list(read_kept(tmp_path / "out"))) == 40
    done = inside("clean", source, "--out", str(tmp_path / "bad"), "--clean.quality.languages", "english")
    assert done.returncode == 2
    assert "clean.quality.languages: 'english' is not the code of a language" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--clean.quality.limits.max_digit_fraction", "0.9"],
        ["--clean.quality.limits.prose.max_digit_fraction", "0.9"],
        ["--clean.quality.limits", "{prose.max_digit_fraction:", "0.9}"],
        ["--clean.quality.limits", "{prose.max_digit_fraction: 0.9}"],
    ],
)
def test_a_limit_can_be_pasted(folder: Path, tmp_path: Path, inside: Command, words: list[str]) -> None:
    source = str(folder / "numbers.txt")
    done = inside("clean", source, "--out", str(tmp_path / "out"), *words)
    assert done.returncode == 0, done.stderr
    assert len(list(read_kept(tmp_path / "out"))) == 1


def test_the_library_of_this_machine_is_enough_trusted_text() -> None:
    documents = read_trusted(("stdlib",), NoiseConfig().num_samples)
    assert {document.kind for document in documents} == {"prose", "code"}
    assert sum(len(document.text.split()) >= 30 for document in documents) >= FEWEST_SAMPLES
