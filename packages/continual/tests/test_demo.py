"""The demonstration at the smallest size: a real server, real requests, a real update, the capacity floor beside it."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from continual_world import World
from modelwright.core.artifacts import read_manifest
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document
from modelwright.pipeline.run_config import read_run_config
from modelwright.recipes.load import load
from modelwright_continual.demo.page import FIGURES, REPORT, SYNTHETIC, write_page
from modelwright_continual.demo.run import Demo, DemoResult, run_demo
from modelwright_continual.demo.size import DemoSize
from modelwright_continual.floor import Floor, FloorRow, require_from_scratch
from refusals import config_error

SMALL = {
    "hardware": {"device": "cpu", "num_threads": 1},
    "tokenizer": {"vocab_size": 512},
    "model": {"vocab_size": 512, "num_layers": 1, "model_dim": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 128},
    "training": {"precision": {"policy": "fp32", "fp32_matmul": "default"}},
    "pretrain": {"num_steps": 20},
    "serve": {"int8": {"backend": "int_mm"}},
    "clean": {"num_workers": 1},
}


SIZE = DemoSize(
    fraction=0.15,
    most={"old": 300, "new": 150},
    most_heldout=60,
    window=60,
    num_windows=5,
    run_length=5.0,
    shifted={"old": 0.0, "new": 1.0},
    min_units=5,
)


@dataclass(frozen=True)
class Shown:
    demo: Demo
    result: DemoResult


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    folder = tmp_path_factory.mktemp("demo")
    sources = {"data": {"sources": [str(folder / "texts/old.jsonl")]}}
    config = load("continual-demo", {**SMALL, **sources}, str(folder / "first")).config
    demo = Demo(folder=folder, config=config, words=["continual", "demo"], progress=SilentProgress(), size=SIZE)
    return Shown(demo, run_demo(demo))


@pytest.mark.slow
def test_the_new_model_is_in_service(shown: Shown) -> None:
    """Old and new texts both get better by several times what the gate's bounds ask for, since the first model has
    learned little.
    """
    demo, result = shown.demo, shown.result
    assert result.loop.ending == "promoted", result.loop.text
    assert result.failures == []
    assert result.num_answered > 360
    assert demo.current.resolve() == (demo.update.path / "release").resolve()
    moments = list(demo.timeline.read())
    assert moments.index("drift reference frozen") < moments.index("users ask about new libraries")
    assert (moments[0], moments[-1]) == ("demonstration begun", "capacity floor measured")
    assert result.handsoff_s is not None
    assert result.total_s == demo.timeline.span_s > result.handsoff_s
    assert demo.timeline.figures("loop ended: promoted")["num_answered"] == result.num_answered


@pytest.mark.slow
def test_the_floor_has_the_texts_and_the_compute_of_both_trainings(shown: Shown) -> None:
    """Forgetting is the change of old texts from the old model; the model from scratch has as many FLOPs as the two."""
    demo, floor = shown.demo, shown.result.floor
    old, updated, scratch = floor.rows
    assert scratch.flops == pytest.approx(updated.flops, rel=0.1)
    assert scratch.flops > old.flops
    assert floor.change(old, "old") == 0.0
    assert updated.bits["new"] < old.bits["new"]
    base, run = demo.first, demo.update.path / "floor"
    config, base_config = read_run_config(run / "config.yaml"), read_run_config(base.config)
    assert config.model == base_config.model
    assert not config.init_from
    assert config.section("pretrain").num_steps > base_config.section("pretrain").num_steps
    learned = {document.text for document in read_kept(run / "clean/artifact", split="train")}
    old_texts = {document.text for document in read_kept(base.stage("clean").artifact, split="train")}
    kept = read_kept(demo.update.stage("clean").artifact, split="train")
    new_texts = {document.text for document in kept if document.source == "new"}
    assert len(learned & old_texts) > 0.95 * len(old_texts)
    assert len(learned & new_texts) > 0.95 * len(new_texts)
    assert not learned - old_texts - new_texts
    assert Floor.read(demo.update.path / "floor.json") == floor


@pytest.mark.slow
def test_no_text_of_a_held_out_module_is_trained_on(shown: Shown) -> None:
    texts = shown.demo.texts
    facts = read_manifest(texts.folder).facts
    bodies = {}
    for task in ("old", "new"):
        for name, path in ((task, texts.train(task)), (f"{task}-heldout", texts.heldout(task))):
            documents = [Document.from_json(line) for line in Path(path).read_text().splitlines()]
            assert len(documents) == facts[name]
            bodies[name] = {document.text.partition("\n\n")[2] for document in documents}
    assert not (bodies["old"] | bodies["new"]) & (bodies["old-heldout"] | bodies["new-heldout"])
    assert all(prompt and len(prompt) <= 160 for prompt in texts.prompts("new"))


@pytest.mark.slow
def test_the_report_says_what_is_made_up_and_has_the_figures(shown: Shown) -> None:
    path = write_page(shown.demo, shown.result)
    page = path.read_text()
    assert path == shown.demo.folder / REPORT
    assert "Made up: the users" in page
    figures = json.loads((shown.demo.folder / FIGURES).read_text())
    assert figures["synthetic"] == SYNTHETIC
    for row, one in zip(shown.result.floor.rows, figures["models"], strict=True):
        assert one["bits_per_byte"] == row.bits
        assert f"{row.bits['old']:.4f}" in page


def test_a_floor_needs_a_run_from_random_weights(world: World, tmp_path: Path) -> None:
    with config_error("floor", match="did not begin with random weights"):
        require_from_scratch(world.base)
    with config_error("floor", match="is not a run"):
        require_from_scratch(world.folder / "model")


def test_the_table_has_the_change_from_the_old_model() -> None:
    rows = [FloorRow(model="old", bits={"old": 2.0, "new": 4.0}, flops=1e9)]
    rows.append(FloorRow(model="updated", bits={"old": 2.1, "new": 3.0}, flops=2e9))
    assert Floor(rows=rows).cells(rows[1]) == ["2.1000 (+5.0%)", "3.0000 (-25.0%)"]
