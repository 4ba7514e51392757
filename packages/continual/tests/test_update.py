"""Updates: what they learn from, how much of it is old, what an average is chosen by."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from continual_update import QUICK, new_records, old_records, write_records
from continual_world import World
from modelwright.core.artifacts import ArtifactError, RunDir, read_manifest
from modelwright.core.config import ConfigError, DataError, derive_seed, read_overrides, split_words
from modelwright.core.progress import SilentProgress
from modelwright.core.records import read_records
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document
from modelwright.data.rows.loader import PackedRows, PlannedLoader, build_loader
from modelwright.pipeline.run import execute
from modelwright.pipeline.run_config import run_schema
from modelwright.pipeline.stages.average import averaged, best_share
from modelwright_continual.ancestry import ancestry_of
from modelwright_continual.benchmark import freeze_benchmark, level_of_use, load_benchmark
from modelwright_continual.heldout import HeldoutTexts
from modelwright_continual.old_texts import ReplaySample, num_bytes
from modelwright_continual.update import UpdateRequest, update_config
from modelwright_continual.update_data import prepare_data
from modelwright_continual.update_files import NEW, OLD
from refusals import config_error

pytestmark = pytest.mark.slow

SILENT = SilentProgress()
SETTINGS = read_overrides(run_schema(), split_words(QUICK)[1])


def request_of(world: World, new: Path, **changes) -> UpdateRequest:
    return replace(UpdateRequest(model=world.base, new=(str(new),), settings=SETTINGS), **changes)


def texts_in(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def packed(world: World, run: RunDir, **changes):
    """The configuration of an update whose rows are packed, and nothing more."""
    request = request_of(world, world.file("new"), **changes)
    run.create()
    data = prepare_data(request.data, world.benchmark, run.path / "data", SILENT)
    config = update_config(request, data, world.benchmark, run)
    execute(config, run, only=("clean", "pack"), origin="test", words=["test"], progress=SILENT)
    return config


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.25])
def test_the_share_of_replay_is_exact(world: World, tmp_path: Path, share: float) -> None:
    """The share is exact, up to one row, in the rows of the first n batches for every n."""
    run = RunDir(tmp_path / "run")
    config = packed(world, run, replay=share)
    training, rows = config.section("sft"), PackedRows(run.path / "pack/artifact/sft/train")
    if not share:
        documents = list(read_kept(run.path / "clean/artifact", split="train"))
        assert {document.source for document in documents} == {NEW}
        return
    loader = build_loader(
        rows,
        training.batching,
        batch_rows=training.batch_rows(rows.seq_len),
        by_tokens=False,
        seed=3,
        num_steps_of=lambda _: 200,
        row_losses=lambda: np.zeros(0),
    )
    assert isinstance(loader, PlannedLoader)
    old, num_old, num_rows = set(rows.source_groups(OLD).tolist()), 0, 0
    for batch in range(200):
        chosen = loader.share(batch).groups.tolist()
        num_old, num_rows = num_old + sum(row in old for row in chosen), num_rows + len(chosen)
        assert abs(num_old - share * num_rows) <= 1.0
    assert num_old >= 1


def test_replay_is_taken_from_the_texts_that_the_model_was_trained_on(world: World, tmp_path: Path) -> None:
    request = request_of(world, world.file("new"), replay=0.25)
    data = prepare_data(request.data, world.benchmark, tmp_path / "data", SILENT)
    known = {document.text for document in read_kept(world.base / "clean/artifact", split="train")}
    texts = {name: texts_in(data.folder / f"{name}.jsonl") for name in (OLD, NEW)}
    assert texts[OLD]
    assert set(texts[OLD]) <= known
    sizes = [sum(map(len, texts[name])) for name in (OLD, NEW)]
    assert sizes[0] / sum(sizes) == pytest.approx(0.25, abs=0.01)


def learned(run: Path, source: str | None = None) -> set[str]:
    kept = read_kept(run / "clean/artifact", split="train")
    return {document.text for document in kept if source in (None, document.source)}


@pytest.mark.slow
def test_a_second_update_replays_every_body_by_its_size(world: World, released: Path, tmp_path: Path) -> None:
    """The first model's texts, all of which the first update had not replayed, and the first update's new ones."""
    source = write_records(tmp_path / "new.jsonl", new_records(range(5000, 5300)))
    request = request_of(world, source, model=released, replay=0.25)
    data = prepare_data(request.data, world.benchmark, tmp_path / "data", SILENT)
    bodies = (learned(world.base), learned(released, NEW))
    drawn = texts_in(data.folder / "old.jsonl")
    ids = [json.loads(line)["id"] for line in (data.folder / "old.jsonl").read_text().splitlines()]
    assert len(drawn) == len(set(drawn)) == len(set(ids))
    assert set(drawn) <= bodies[0] | bodies[1]
    assert set(drawn) & bodies[0] - learned(released, OLD)
    size_of = [sum(map(len, body)) for body in bodies]
    size_drawn = [sum(map(len, body & set(drawn))) for body in bodies]
    assert size_drawn[0] / sum(size_drawn) == pytest.approx(size_of[0] / sum(size_of), abs=0.12)
    assert data.facts["old_runs"] == [str(released.resolve()), str(world.base.resolve())]
    ways = (released / "release", released / "average/artifact", released / "quantize/artifact")
    assert all(ancestry_of(way) == ancestry_of(released) for way in ways)


def test_a_sample_is_the_texts_of_lowest_rank_in_whatever_order_they_come() -> None:
    texts = [f"text {number} " + "x" * (number * 7 % 50) for number in range(300)]
    every = [Document(id=text, text=text, kind="prose", split="train", source="a") for text in [*texts, *texts[:40]]]
    ranked = sorted(every[:300], key=lambda document: derive_seed(3, "replay", document.text))
    expected: list[Document] = []
    while sum(map(num_bytes, expected)) < 2000:
        expected.append(ranked[len(expected)])
    for order in range(3):
        sample, most = ReplaySample(3, 2000), 0
        for document in random.Random(order).sample(every, len(every)):
            sample.add(document)
            most = max(most, sample.num_bytes)
        assert sample.texts() == expected
        assert most < 2000 + 2 * max(map(num_bytes, every))
    alone = ReplaySample(3, 1e9)
    for document in every:
        alone.add(document)
    assert sorted(document.text for document in alone.texts()) == sorted(texts)


def as_records(documents) -> list[dict[str, str]]:
    return [{"question": d.messages[0]["content"], "answer": d.messages[1]["content"]} for d in documents]


def test_what_any_run_before_held_out_is_left_alone(world: World, released: Path, tmp_path: Path) -> None:
    """By the second update, and by one that is told what to replay."""
    heldout = as_records(read_kept(world.base / "clean/artifact", split="heldout"))
    assert len(heldout) > 3
    source = write_records(tmp_path / "new.jsonl", new_records(range(5000, 5040)), heldout)
    texts = str(write_records(tmp_path / "old.jsonl", old_records(range(700, 900))))
    requests = (request_of(world, source, model=released), request_of(world, source, old=(texts,)))
    for number, request in enumerate(requests):
        data = prepare_data(request.data, world.benchmark, tmp_path / f"data-{number}", SILENT)
        assert data.facts["dropped"] == {"held-out question": len(heldout)}
        known = {json.loads(line)["text"] for line in (data.folder / "heldout.jsonl").read_text().splitlines()}
        assert {f"{one['question']}\n\n{one['answer']}" for one in heldout} <= known


def test_old_texts_are_screened_and_drawn_beside_those_of_the_runs(world: World, tmp_path: Path) -> None:
    leaks = as_records(world.benchmark.read("old", "test")[:20])
    wrong = [{**one, "answer": "Its color is wrong."} for one in leaks]
    old = str(write_records(tmp_path / "old.jsonl", old_records(range(700, 900)), leaks, wrong))
    request = request_of(world, world.file("new"), old=(old,), replay=0.5)
    data = prepare_data(request.data, world.benchmark, tmp_path / "data", SILENT)
    assert data.facts["old_dropped"] == {"held-out question": 40}
    drawn = set(texts_in(data.folder / "old.jsonl"))
    assert drawn & learned(world.base)
    assert drawn - learned(world.base)
    assert not {f"{one['question']}\n\n{one['answer']}" for one in [*leaks, *wrong]} & drawn


def test_old_texts_that_no_run_has_are_asked_for(world: World, tmp_path: Path) -> None:
    """What an update replayed from files has to be named again, and a run that is gone is missed."""
    run, old = RunDir(tmp_path / "run"), (str(world.file("old")),)
    packed(world, run, model=world.folder / "model", old=old)
    with config_error("old", match=r"--old: .*replayed texts that no run has cleaned .*old\.jsonl.*--replay 0"):
        _ = request_of(world, world.file("new"), model=run.path).data
    assert request_of(world, world.file("new"), model=run.path, old=old).data.old == old
    second = RunDir(tmp_path / "second")
    packed(world, second)
    gone = tmp_path / "gone/sft/artifact"
    second.config.write_text(second.config.read_text().replace(str(world.base / "sft/artifact"), str(gone)))
    assert ancestry_of(second.path).lost == str(gone)
    with config_error("old", match=r"--old: .*gone/sft/artifact is gone, and with it the texts of its run"):
        _ = request_of(world, world.file("new"), model=second.path).data


def test_held_out_questions_are_filtered_whatever_their_answer(world: World, tmp_path: Path) -> None:
    """Leaks word for word, with other punctuation, and questions with wrong answers: none is left after cleaning."""
    heldout = [*world.benchmark.read("new", "test")[:5], *world.benchmark.read("old", "validation")[:5]]
    leaks = [{"question": d.messages[0]["content"], "answer": d.messages[1]["content"]} for d in heldout]
    wrong = [{**one, "question": one["question"].upper() + "!", "answer": "Kind: wrong"} for one in leaks]
    source = write_records(tmp_path / "new.jsonl", new_records(range(3000, 3040)), leaks, wrong)
    run = RunDir(tmp_path / "run").create()
    data = prepare_data(request_of(world, source).data, world.benchmark, run.path / "data", SILENT)
    assert data.facts["dropped"] == {"held-out question": 20}
    config = update_config(request_of(world, source), data, world.benchmark, run)
    assert config.section("clean").decontamination.sources == (data.heldout,)
    texts = HeldoutTexts.of(world.benchmark.every_document())
    assert not [text for text in texts_in(data.folder / "new.jsonl") if "wrong" in text or "!" in text]
    assert texts.found_in(heldout[0]) == "held-out question"


def test_long_passages_are_left_to_decontamination(world: World, tmp_path: Path) -> None:
    """A text with 13 words of a held-out one under another question is dropped by the run's cleaning."""
    passage = " ".join(f"word{number}" for number in range(20))
    heldout = [{"question": f"Recite {n}", "answer": f"{passage} {n}"} for n in range(40)]
    old = write_records(tmp_path / "old.jsonl", old_records(range(40)))
    benchmark = freeze_benchmark([str(old)], [str(write_records(tmp_path / "h.jsonl", heldout))], tmp_path / "bench")
    leak = [{"question": "Say it", "answer": f"So: {passage}."}]
    source = write_records(tmp_path / "new.jsonl", new_records(range(40)), leak)
    run, request = RunDir(tmp_path / "run").create(), request_of(world, source, average=False)
    data = prepare_data(request.data, benchmark, run.path / "data", SILENT)
    assert data.facts["new"] == 41
    config = update_config(request, data, benchmark, run)
    execute(config, run, only=("clean",), origin="test", words=["test"], progress=SILENT)
    kept = [document for document in read_kept(run.path / "clean/artifact") if document.source == NEW]
    assert len(kept) == 40
    assert not [document for document in kept if passage in document.text]


def test_another_update_in_the_same_folder_is_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    first = prepare_data(request_of(world, world.file("new")).data, world.benchmark, folder, SILENT)
    stamp = (folder / "new.jsonl").stat().st_mtime_ns
    again = prepare_data(request_of(world, world.file("new")).data, world.benchmark, folder, SILENT)
    assert again == first
    assert (folder / "new.jsonl").stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match="another share of replay"):
        prepare_data(request_of(world, world.file("new"), replay=0.1).data, world.benchmark, folder, SILENT)


def test_text_is_learned_by_pretraining_and_conversations_by_fine_tuning(world: World, tmp_path: Path) -> None:
    """In one update; each starts from the model before it, and the schedule warms up again."""
    words = ("kana", "lori", "miva", "rusto", "telen", "sopit", "nako", "rilo", "vami", "lenru")
    texts = [" ".join(words[(n * k + k) % 10] for k in range(1, 30)).capitalize() + f" {n}." for n in range(60)]
    prose = tmp_path / "prose.jsonl"
    prose.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = read_overrides(run_schema(), split_words([*QUICK, "--pretrain.num_steps=6"])[1])
    new = (str(prose), str(world.file("new")))
    request = UpdateRequest(model=world.base, new=new, replay=0.0, average=False, settings=settings)
    run = RunDir(tmp_path / "run").create()
    data = prepare_data(request.data, world.benchmark, run.path / "data", SILENT)
    assert data.forms == ("conversations", "text")
    config = update_config(request, data, world.benchmark, run)
    assert [name for name in config.stage_names if name in ("pretrain", "sft")] == ["pretrain", "sft"]
    execute(config, run, only=("clean", "pack", "pretrain", "sft"), origin="test", words=["test"], progress=SILENT)
    facts = read_manifest(run.stage("sft").artifact)
    assert set(facts.inputs) == {"pack", "init", "pretrain"}
    losses = [record["loss"] for record in read_records(run.path / "pretrain/metrics.jsonl") if "loss" in record]
    assert losses[-1] < losses[0]
    rates = [r["learning_rate"] for r in read_records(run.path / "sft/metrics.jsonl") if "learning_rate" in r]
    assert max(rates) == pytest.approx(5e-3)
    assert rates[-1] < 0.2 * max(rates)


def test_bad_requests_name_the_remedy(world: World, tmp_path: Path) -> None:
    with config_error("old", match=r"--old: the model is not a run.*--replay 0"):
        _ = request_of(world, world.file("new"), model=world.folder / "model").data
    with config_error("replay"):
        _ = request_of(world, world.file("new"), replay=1.0).data
    text = tmp_path / "new.txt"
    text.write_text("Some prose, which the first model never saw.\n\n" * 40)
    with pytest.raises(DataError, match="lacks text to replay"):
        prepare_data(request_of(world, text).data, world.benchmark, tmp_path / "data", SILENT)
    with config_error("seed"):
        _ = request_of(world, world.file("new"), settings={"seed": "abc"}).data
    data = prepare_data(request_of(world, world.file("new")).data, world.benchmark, tmp_path / "whole", SILENT)
    request = request_of(world, world.file("new"), settings={"sft": 5})
    with config_error("sft"):
        update_config(request, data, world.benchmark, RunDir(tmp_path))
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt": "A?", "answer": "B.", "answer_by": "modelwright"}))
    with pytest.raises(DataError, match="Modelwright's own"):
        prepare_data(request_of(world, own).data, world.benchmark, tmp_path / "data", SILENT)


def test_a_benchmark_is_frozen_and_its_uses_are_counted(world: World, tmp_path: Path) -> None:
    old, new = (str(world.file(f"{task}-heldout")) for task in (OLD, NEW))
    benchmark = freeze_benchmark([old], [new], tmp_path / "bench")
    assert benchmark.digest == world.benchmark.digest
    halves = [{d.text for d in benchmark.read("new", half)} for half in ("validation", "test")]
    assert [len(half) for half in halves] == [50, 50]
    assert not halves[0] & halves[1]
    with pytest.raises(ConfigError, match="which never changes"):
        freeze_benchmark([old], [new], tmp_path / "bench")
    with pytest.raises(DataError, match="--new"):
        freeze_benchmark([old], [old], tmp_path / "other")
    assert [benchmark.count_use(one, "champion", 2).number for one in ("a", "b", "a")] == [1, 2, 1]
    with pytest.raises(ConfigError, match="was used 2 times"):
        benchmark.count_use("c", "champion", 2)
    assert len(benchmark.uses) == 2
    assert sum(level_of_use(number, 0.05) for number in range(1, 10_000)) == pytest.approx(0.05, rel=1e-3)
    path = benchmark.file("new", "test")
    path.write_text(path.read_text().replace("tool", "fool"))
    with pytest.raises(ArtifactError, match=r"new-test\.jsonl"):
        load_benchmark(tmp_path / "bench")


def test_an_update_keeps_its_lengths_whatever_processes_go_on_with_it(world: World, tmp_path: Path) -> None:
    """A new one has whole rows for each process."""
    own = {name: value for name, value in SETTINGS["sft"].items() if name != "batch_tokens"}
    settings = {**SETTINGS, "pack": {}, "sft": own}
    run = RunDir(tmp_path / "run")
    first = packed(world, run, settings=settings)
    request = request_of(world, world.file("new"), settings=settings, num_processes=4)
    data = prepare_data(request.data, world.benchmark, run.path / "data", SILENT)
    lengths = []
    for config in (first, *(update_config(request, data, world.benchmark, one) for one in (run, RunDir(tmp_path)))):
        lengths.append((config.section("pack").seq_len, config.section("sft").batch_tokens))
    assert lengths[0] == lengths[1] != lengths[2]
    assert lengths[2][1] // lengths[2][0] % 4 == 0


def test_averages_are_exact_at_both_ends_and_linear_between() -> None:
    draw = torch.Generator().manual_seed(0)
    old, new = ({"w": torch.randn(5, 7, generator=draw)} for _ in range(2))
    assert torch.equal(averaged(old, new, 1.0)["w"], old["w"])
    assert torch.equal(averaged(old, new, 0.0)["w"], new["w"])
    torch.testing.assert_close(averaged(old, new, 0.3)["w"], 0.3 * old["w"] + 0.7 * new["w"])


def test_the_best_share_keeps_old_tasks_within_the_margin() -> None:
    costs = {0.0: (1.5, 0.5), 0.2: (1.03, 0.6), 0.5: (1.01, 0.8), 0.8: (1.0, 0.95)}
    assert best_share(costs, before=1.0, margin=0.02) == 0.5
    assert best_share(costs, before=1.0, margin=0.05) == 0.2
    assert best_share(costs, before=0.5, margin=0.02) == 0.8


@pytest.fixture(scope="module")
def update(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDir]:
    """Runs an update up to its average, with another benchmark if one is given."""

    def make(name: str, benchmark=None, into: RunDir | None = None) -> RunDir:
        run = (into or RunDir(tmp_path_factory.mktemp(name) / "run")).create()
        request = request_of(world, world.file("new"), replay=0.25)
        data = prepare_data(request.data, world.benchmark, run.path / "data", SILENT)
        config = update_config(request, data, benchmark or world.benchmark, run)
        only = ("clean", "pack", "sft", "average")
        execute(config, run, only=only, origin="test", words=["test"], progress=SILENT)
        return run

    return make


def test_the_share_of_the_average_is_chosen_on_the_validation_half_alone(
    world: World, tmp_path: Path, update: Callable[..., RunDir]
) -> None:
    """Other test halves change nothing, to the bit; another validation half does."""
    run = update("first")
    facts = dict(read_manifest(run.stage("average").artifact).facts)
    weights = (run.stage("average").artifact / "model.safetensors").read_bytes()
    assert set(facts["costs"]) == {"0", "0.2", "0.5", "1"}
    other = freeze_benchmark([str(world.file("old-heldout"))], [str(world.file("new-heldout"))], tmp_path / "bench")
    for task in (OLD, NEW):  # an average that read these would find nothing
        other.file(task, "test").unlink()
    update("second", other, run)
    assert read_manifest(run.stage("average").artifact).facts == facts
    assert (run.stage("average").artifact / "model.safetensors").read_bytes() == weights
    validation = other.file(OLD, "validation")
    validation.write_text("".join(validation.read_text().splitlines(keepends=True)[:25]))
    update("third", other, run)
    assert read_manifest(run.stage("average").artifact).facts["costs"] != facts["costs"]
