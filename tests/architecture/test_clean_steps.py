"""Steps of cleaning that the package does not know: named on the command line they run, are killed, resume with the
same bytes, and stand in the report beside the package's own.
"""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from cleaned import result_files
from modelwright.cli.main import main
from modelwright.core.config import ConfigError, DataError
from modelwright.core.extensions import NoSettings
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import config as clean_config
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps, load_step
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.clean.report import CleanReport, describe_drops
from modelwright.data.clean.steps.format import Format, FormatConfig
from modelwright.data.clean.steps.step import Step, StepSpec
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from refusals import config_error

OWN = Path(__file__).parent / "my_steps.py"
NOUNS = ("river", "letter", "market", "garden", "window", "teacher", "harbor", "winter", "engine", "village")


def sentence(number: int) -> str:
    noun = NOUNS[number % 10]
    words = (f"the {NOUNS[number * n % 10]} of number {number * n % 9973}" for n in (3, 7, 9))
    return f"Near the {noun} they spoke quietly of {' and '.join(words)}, as was planned in the {noun}."


def document(number: int, text: str = "") -> Document:
    opening = ("Once", "* Later", "Never")[number % 3]
    text = text or f"{opening} {sentence(number)}"
    return Document(id=f"d{number}", text=text, kind="prose", split="train", source="test")


TABLE = "a table | " * 30
BROKEN = "this cannot be read at all, says the secret word swordfish"
NAMES = ("NoTables", "FewOfEachOpening", "shout")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "documents.jsonl"
    texts = [document(number).text for number in range(200)]
    texts[7:7] = [TABLE, BROKEN]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(["clean", str(source), "--out", str(out), "--clean.steps", *(f"{OWN}:{name}" for name in NAMES)]) == 0
    return out


def test_they_drop_and_change_documents(whole: Path) -> None:
    dropped = {(entry.step, entry.reason): entry for entry in read_dropped(whole)}
    assert dropped["no_tables", "table"].detail == "30 cells, limit 20"
    failed = dropped["no_tables", "the step failed"]
    assert failed.detail.startswith("RuntimeError in my_steps.py:")
    assert failed.document.text == BROKEN, "nothing is lost"
    assert "swordfish" not in failed.detail
    kept = list(read_kept(whole))
    assert 0 < len(kept) <= 3 * 40
    assert all("LOUDLY" in entry.text and not entry.text.startswith("*") for entry in kept)
    report = json.loads((whole / "report.json").read_text())
    assert report["figures"] == {"openings": {"openings": 3}}
    assert list(report["dropped"])[:2] == ["no_tables", "openings"], "in the order of the steps"
    assert "1 no_tables: the step failed" in describe_drops(CleanReport(**report))


def test_a_dry_run_shows_them(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", str(source), "--dry-run", "--clean.steps", f"{OWN}:NoTables"]) == 0
    assert "no_tables: table\n" in capsys.readouterr().out


def clean_slowly_enough(source: Path, out: Path) -> None:
    data = SourceConfig(sources=(str(source),), validation_fraction=0.0)
    steps = build_steps(CleanConfig(steps=tuple(f"{OWN}:{name}" for name in NAMES)))
    arguments = {"work": out / "work", "key": "x", "shard_documents": 10}
    clean_documents(read_documents(data, report=SourceReport()), steps, out, SilentProgress(), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["00011.measured0.json", "00003.measured1.json", "00007.written.json"])
def test_they_resume_with_the_same_bytes(stage: str, source: Path, tmp_path: Path) -> None:
    """Killed when the file appears: each phase of the steps has one."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = multiprocessing.get_context("fork").Process(target=clean_slowly_enough, args=(source, killed))
    process.start()
    while process.is_alive() and not any(killed.rglob(stage)):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert not (killed / "report.json").exists()
    for out in (killed, whole):
        clean_slowly_enough(source, out)
    for name in result_files(whole):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_any_list_of_steps_runs(tmp_path: Path) -> None:
    """Corpus steps before others, twice the same class, and no step at all."""
    few, shout = (load_step(f"{OWN}:{name}") for name in ("FewOfEachOpening", "shout"))
    documents = [document(number) for number in range(200)]
    clean_documents(iter(documents), [few, shout, Format(FormatConfig())], tmp_path / "a", SilentProgress())
    assert len(list(read_kept(tmp_path / "a"))) == 3 * 40
    clean_documents(iter(documents), [], tmp_path / "b", SilentProgress())
    assert list(read_kept(tmp_path / "b")) == documents
    shards = tmp_path / "c"
    clean_documents(iter(documents), [few, shout, Format(FormatConfig())], shards, SilentProgress(), shard_documents=13)
    assert list(read_kept(shards)) == list(read_kept(tmp_path / "a"))


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("NoTables", r"steps\.NoTables: no installed package adds it to modelwright\.steps"),
        ("nowhere.py:NoTables", r"steps: nowhere\.py: cannot be read \(No such file"),
        (
            f"{OWN}:NoTable",
            r"has no NoTable; did you mean 'NoTables'\? \(it has NoTables, Few",
        ),
        (f"{OWN}:NeedsSettings", "NeedsSettings cannot be made without arguments.*give its fields defaults"),
        (f"{OWN}:class_that_is_a_number", "is not a step"),
    ],
)
def test_a_step_that_cannot_be_loaded_is_one_clear_error(reference: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_steps(CleanConfig(steps=(reference,)))


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    for text, problem in (("import nothing_of_this_name", "ModuleNotFoundError in mine.py:1"), ("x = (", "mine.py:1")):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(ConfigError, match=rf"mine\.py: cannot be imported .*{problem}"):
            load_step(f"{tmp_path / 'mine.py'}:Step")


def test_two_steps_of_one_name() -> None:
    with config_error("steps", match="there are two steps called 'no_tables'"):
        build_steps(CleanConfig(steps=(f"{OWN}:NoTables", f"{OWN}:NoTables")))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("forgets", r"my_steps\.py:forgets: returned a NoneType for d0; a step returns the document"),
        ("FailsLate", r"my_steps\.py:FailsLate: decide raised KeyError in my_steps\.py:\d+"),
    ],
)
def test_what_is_wrong_with_every_document_ends_the_work(name: str, problem: str, tmp_path: Path) -> None:
    step: Step = load_step(f"{OWN}:{name}")
    with pytest.raises(DataError, match=problem):
        clean_documents(iter([document(0)]), [step], tmp_path, SilentProgress())


def test_a_step_of_a_package_has_fields_that_identify_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        name = "plain"

        def __call__(self, document: Document) -> Document:
            return document

    spec = StepSpec(name="plain", build=lambda settings, seed: Plain(), config=NoSettings)
    monkeypatch.setattr(clean_config, "_named", lambda entry: {"plain": (spec, NoSettings())})
    with config_error("steps.plain", match="builds a Plain; make it a dataclass"):
        build_steps(CleanConfig(steps=({"plain": {}},)))
