"""What the report says about loss scales, spikes and rollbacks."""

from pathlib import Path

from modelwright.core.artifacts import StageDir
from modelwright.pipeline.report.blocks import Chart, Fold, Note, Page, Section
from modelwright.pipeline.report.page import render
from modelwright.pipeline.report.results import scale_blocks, spike_blocks
from modelwright.pipeline.report.run_data import StageData

SCALE = {"value": 1024.0, "num_good": 3, "num_overflows": 2, "history": [[0, 4096.0], [7, 2048.0], [9, 1024.0]]}
RECORD = {"loss_scale": 4096.0}
RECORDS = [{**RECORD, "step": step, "skipped": step == 7} for step in range(1, 10)]
EVENTS = [
    {"kind": "spike", "step": 8, "batches": [7, 7], "loss": 9.5, "norm": 3.25},
    {"kind": "spike", "step": 9, "batches": [8, 8], "loss": 9.75, "norm": "inf"},
    {"kind": "rollback", "step": 9, "batches": [6, 8]},
]


def stage(**facts) -> StageData:
    return StageData("pretrain", StageDir(Path("nowhere")), facts, [], True)


def page(blocks) -> str:
    return render(Page(title="t", subtitle="", facts=[], sections=[Section("one", "One", blocks)]))


def test_nothing_is_said_of_what_was_not_used():
    for facts in ({}, {"loss_scale": {}, "left_out": []}):
        assert scale_blocks(stage(**facts), RECORDS) == []
        assert spike_blocks(stage(**facts)) == []


def test_overflows_changes_and_skipped_steps_of_the_loss_scale():
    chart, changes = scale_blocks(stage(loss_scale=SCALE), RECORDS)
    assert isinstance(chart, Chart)
    assert chart.caption.startswith("Loss scale: 1,024 at the end, 2 overflows, 2 changes; ")
    assert "1 of the recorded steps made no update" in chart.caption
    assert isinstance(changes, Fold)
    assert changes.items[0].text.splitlines() == ["step      0  2^12", "step      7  2^11", "step      9  2^10"]


def test_a_loss_scale_that_never_changed_has_no_list_of_changes():
    blocks = scale_blocks(stage(loss_scale={**SCALE, "num_overflows": 0, "history": [[0, 1024.0]]}), RECORDS)
    assert [type(block) for block in blocks] == [Chart]


def test_batches_that_were_left_out_and_taken_back():
    note, events = spike_blocks(stage(left_out=EVENTS))
    assert isinstance(note, Note)
    assert note.text == "2 updates skipped as spikes; 1 rollback undid 3 updates."
    assert isinstance(events, Fold)
    assert "batches 6 to 8 undone" in events.items[0].text
    assert "2^" in page(scale_blocks(stage(loss_scale=SCALE), RECORDS))
    assert "batch 7 skipped" in page([note, events])
