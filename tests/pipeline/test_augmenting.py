"""`modelwright augment`: copies, resume, workers, held-out documents, preview; and our engine as a filler of gaps."""

import json
from pathlib import Path
from random import Random

import pytest
import torch

import augment_texts
import tiny_decoder
from modelwright.cli.main import main
from modelwright.data.augment.span_infilling import SpanInfillingConfig, span_infilling
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.attention import packed_attend
from modelwright.model.hf import save_model
from modelwright.pipeline import augmenting
from modelwright.pipeline.augmenting import InfillModel

ARGUMENTS = ["--augment.methods", "keyboard_typos", "comment_dropping", "--augment.copies", "2"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"text": f"{text} Number {n}."}) for n in range(4) for text in augment_texts.PROSE]
    (folder / "prose.jsonl").write_text("\n".join(lines))
    (folder / "mean.py").write_text(augment_texts.CODE[0])
    return folder


def run(corpus: Path, out: Path, *more: str) -> list[dict]:
    assert main(["augment", str(corpus), str(out), *ARGUMENTS, *more]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_copies_can_be_read_as_training_documents(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "copies.jsonl"
    records = run(corpus, out, "--augment.num_workers", "1")
    printed = capsys.readouterr().out
    assert "documents/s" in printed
    assert f"{len(records)} copies of 81 documents" in printed
    held_out = {
        d.id for d in read_documents(SourceConfig(sources=(str(corpus),)), report=SourceReport()) if d.split != "train"
    }
    assert held_out
    origins = {record["meta"]["augmented_from"] for record in records}
    assert not origins & held_out
    assert len({record["id"] for record in records}) == len(records) > 130
    assert {record["meta"]["augmentation"] for record in records} == {"keyboard_typos", "comment_dropping"}
    again = list(read_documents(SourceConfig(sources=(str(out),)), report=SourceReport()))
    assert [document.id for document in again] == [record["id"] for record in records]
    assert {document.split for document in again} == {"train"}
    assert not out.with_name("copies.jsonl.work").exists()


def test_workers_and_an_interruption_do_not_change_the_copies(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(corpus, tmp_path / "whole.jsonl", "--augment.num_workers", "1")
    monkeypatch.setattr(augmenting, "_SHARD_DOCUMENTS", 30)
    assert run(corpus, tmp_path / "two.jsonl", "--augment.num_workers", "2") == whole
    made: list[int] = []
    original = augmenting.augment_shard

    def stop_at_second(job: augmenting.ShardJob) -> int:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(job.shard.number)
        return original(job)

    out = tmp_path / "cut.jsonl"
    monkeypatch.setattr(augmenting, "augment_shard", stop_at_second)
    assert main(["augment", str(corpus), str(out), *ARGUMENTS, "--augment.num_workers", "1"]) == 130
    assert not out.exists()
    done = list(out.with_name("cut.jsonl.work").rglob("*.copies.json"))
    assert len(done) == 1
    before = done[0].stat().st_mtime_ns
    monkeypatch.setattr(augmenting, "augment_shard", original)
    monkeypatch.setattr(augmenting.shutil, "rmtree", lambda path: None)
    assert run(corpus, out, "--augment.num_workers", "1") == whole
    assert done[0].stat().st_mtime_ns == before, "the finished shard was not made again"


def test_files_of_others_are_not_removed(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    notes = tmp_path / "copies.jsonl.work" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    assert main(["augment", str(corpus), str(tmp_path / "copies.jsonl"), *ARGUMENTS]) == 2
    assert "has other files; choose another output" in capsys.readouterr().err
    assert notes.read_text() == "mine"


def test_a_preview_marks_what_changes_and_writes_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "copies.jsonl"
    assert main(["augment", str(corpus), str(out), "--preview", "3", "--augment.methods", "random_swap"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("random_swap:") == 3
    assert printed.count("[") >= 6
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--augment.methods", "random_swop"], "did you mean"),
        (["--random_swap.fraction", "2"], "random_swap.fraction: 2.0 is not in"),
        (["--augment.methods", "span_infilling"], "span_infilling.model: is not set"),
        (["--synonym_replacement.wordnet", "/nowhere"], "apt install wordnet-base"),
    ],
    ids=["method", "fraction", "model", "wordnet"],
)
def test_mistakes(corpus: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["augment", str(corpus), str(tmp_path / "o.jsonl"), *words]) == 2
    assert message in capsys.readouterr().err
    assert main(["augment", str(corpus), str(tmp_path / "o.txt")]) == 2
    assert "ending .jsonl" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(list(augment_texts.PROSE) * 3, TokenizerConfig(vocab_size=700))
    model = tiny_decoder.make_decoder(vocab_size=tokenizer.vocab_size, max_seq_len=128)
    save_model(model, folder)
    tokenizer.save(folder)
    return folder


def test_the_engine_writes_the_same_alone_and_together(model_folder: Path) -> None:
    model = InfillModel(model_folder)
    prompts = [text[:50].rstrip() for text in augment_texts.PROSE[:5]] + ["word " * 300]
    together = model.complete(prompts, max_tokens=12, seeds=range(6))
    assert all(together)
    assert together == [model.complete([p], max_tokens=12, seeds=[n])[0] for n, p in enumerate(prompts)]
    assert together != model.complete(prompts, max_tokens=12, seeds=range(10, 16))


def test_scores_are_those_of_the_model(model_folder: Path) -> None:
    model = InfillModel(model_folder)
    (score,) = model.log_probs(["The quick brown"], [" dog ran across"])
    tokenizer, decoder = model._tokenizer, model._model
    known, scored = tokenizer.encode("The quick brown"), tokenizer.encode(" dog ran across")
    ids = torch.tensor([[model._start, *known, *scored]])
    positions, segments = torch.arange(ids.shape[1])[None], torch.zeros_like(ids, dtype=torch.int32)
    with torch.no_grad():
        logits = decoder.logits(decoder(ids, positions, packed_attend(segments)))
    log_probs = logits.float().log_softmax(dim=-1)[0, len(known) : -1]
    expected = log_probs.gather(1, torch.tensor(scored)[:, None]).sum()
    assert score == pytest.approx(float(expected), rel=1e-4)


def test_infilling_with_our_engine_is_deterministic(model_folder: Path) -> None:
    method = span_infilling(SpanInfillingConfig(model=model_folder, fraction=0.5, num_candidates=8), InfillModel)
    documents = [
        Document(id=str(n), text=text, kind="prose", split="train", source="t")
        for n, text in enumerate(augment_texts.PROSE[:4])
    ]
    together = method.change(documents, [Random(n) for n in range(4)])
    assert together == [method(document, Random(n)) for n, document in enumerate(documents)]
