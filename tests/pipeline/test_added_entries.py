"""Lists that another package adds to by entry points: export forms, corpora and back-ends."""

import sys
from pathlib import Path

import pytest

from finetune_files import write_model
from modelwright.cli.main import main
from modelwright.core.errors import ConfigError
from modelwright.data.clean.config import CleanConfig
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.pipeline.cleaning import fingerprint
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import backend_of

SOURCE = """
from pathlib import Path
from modelwright.data.sources.corpora import NamedCorpus
from modelwright.data.document import Document
from modelwright.pipeline.exports.export import Export
from modelwright.serve.engines.backends import Backend

def write(found, target, options):
    target.write_text(f"{found.source.name} as {options.dtype}")
    return target

CORPUS = NamedCorpus(
    read=lambda **_: iter([Document(text="roses are red", id="poem", source="poems", kind="prose", split="train")]),
    decided_by=lambda: ["1.0"],
)
EXPORT = Export(name="card", summary="a card", write=write, target=lambda *_: Path("card"), dtypes=("small", "large"))
BACKEND = Backend(load=lambda source, config: None, weights=("w4",))
"""
ENTRIES = """[modelwright.corpora]
poems = further_entries:CORPUS
[modelwright.exports]
card = further_entries:EXPORT
broken = further_entries:NOTHING
[modelwright.backends]
echo = further_entries:BACKEND
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "further_entries-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "further_entries.py").write_text(SOURCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: further_entries\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.delitem(sys.modules, "further_entries", raising=False)


def test_an_export_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = write_model(tmp_path / "tiny"), tmp_path / "out"
    for words, dtype in (((), "small"), (("--dtype", "large"), "large")):
        assert main(["export", str(model), "--to", "card", str(target), *words]) == 0
        assert target.read_text() == f"tiny as {dtype}"
    assert main(["export", str(model), "--to", "card", "--int8"]) == 2
    assert main(["export", str(model), "--to", "broken"]) == 2
    assert "entry point broken of modelwright.exports" in capsys.readouterr().err


def test_a_corpus() -> None:
    config = SourceConfig(sources=("poems",), validation_fraction=0.0)
    assert [document.text for document in read_documents(config, report=SourceReport())] == ["roses are red"]
    assert fingerprint(config, CleanConfig()) == [["poems", "1.0"]]


def test_a_back_end() -> None:
    assert backend_of(ServeConfig(backend="echo:w4")).weights == ("w4",)
    with pytest.raises(ConfigError, match="choose weights from w4"):
        backend_of(ServeConfig(backend="echo:w5"))
    with pytest.raises(ConfigError, match="'eco' is unknown; choose from modelwright, openvino, echo"):
        backend_of(ServeConfig(backend="eco"))


def test_a_back_end_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.core.extensions.entry_points", lambda **selected: ())
    with pytest.raises(ConfigError, match=r"pip install 'modelwright\[vllm\]'"):
        backend_of(ServeConfig(backend="vllm"))
