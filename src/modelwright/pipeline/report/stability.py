"""The report's blocks on training stability: the history of the loss scale, skipped spikes, rollbacks."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright.core.records import column
from modelwright.pipeline.report.blocks import Block, Chart, Excerpt, Fold, Note, Table
from modelwright.pipeline.report.charts import Line, line_chart
from modelwright.pipeline.report.format import count, first_lines, number, plural
from modelwright.pipeline.report.run_data import StageData

_CHANGES_SHOWN = 60
_LAYERS = {
    "loss_scale": "common",
    "loss_scale/lowest_layer": "lowest layer",
    "loss_scale/highest_layer": "highest layer",
}


def scale_blocks(stage: StageData, records: Sequence[dict[str, Any]]) -> list[Block]:
    """A chart of the scale, its overflows and changes; empty if losses were not scaled."""
    state = stage.facts.get("loss_scale")
    if not state:
        return []
    layers = state.get("layers")
    skipped = sum(bool(record.get("skipped")) for record in records)
    words = f"Loss scale: {number(state['value'])} at the end, {plural(state['num_overflows'], 'overflow')}, "
    words += f"{plural(len(state['history']) - 1, 'change')}; {count(skipped)} of the recorded steps made no update."
    lines = [
        Line(label, column(records, metric), color=color)
        for color, (metric, label) in enumerate(_LAYERS.items())
        if column(records, metric)
    ]
    chart = line_chart(lines, name=f"{stage.name}-scale", x_label="step", y_label="loss scale", log=True)
    changes = [(step, f"step {step:>6}  {_power(value)}") for step, value in state["history"]]
    if layers:
        changes += [(step, f"step {step:>6}  {_power(value)}  layer {at}") for step, at, value in layers["history"]]
    text = first_lines([line for _, line in sorted(changes)], _CHANGES_SHOWN)
    blocks: list[Block] = [Chart("Loss scale", chart, words)]
    if len(changes) > 1:  # the first entry is the initial scale
        blocks.append(Fold("Changes of the loss scale", [Excerpt("", text)]))
    return [*blocks, _layer_table(layers)] if layers else blocks


def spike_blocks(stage: StageData) -> list[Block]:
    """Batches skipped as spikes and rollbacks; empty if there were none."""
    events = stage.facts.get("left_out") or []
    if not events:
        return []
    spikes = [event for event in events if event["kind"] == "spike"]
    rollbacks = [event for event in events if event["kind"] == "rollback"]
    words = f"{plural(len(spikes), 'update')} skipped as spikes"
    if rollbacks:
        lost = sum(event["batches"][1] - event["batches"][0] + 1 for event in rollbacks)
        words += f"; {plural(len(rollbacks), 'rollback')} undid {plural(lost, 'update')}"
    text = first_lines([*map(_event_words, events)], _CHANGES_SHOWN, "loss_spikes.jsonl")
    return [Note(words + ".", "warning"), Fold("Skipped batches", [Excerpt("", text)])]


def _layer_table(layers: Mapping[str, Any]) -> Table:
    rows = [
        [str(layer), _power(value), str(overflows)]
        for layer, (value, overflows) in enumerate(zip(layers["values"], layers["num_overflows"], strict=True))
    ]
    return Table(["layer", "loss scale", "overflows"], rows, "Loss scales of the layers, at the end", numeric=(0, 1, 2))


def _event_words(event: Mapping[str, Any]) -> str:
    first, last = event["batches"]
    if event["kind"] == "rollback":
        return f"step {event['step']:>6}  rolled back to step {first}: batches {first} to {last} undone"
    loss, norm = (value if isinstance(value, str) else number(value) for value in (event["loss"], event["norm"]))
    return f"step {event['step']:>6}  batch {first} skipped: loss {loss}, gradient norm {norm}"


def _power(value: float) -> str:
    """Format a scale, usually a power of two."""
    mantissa, exponent = value.hex().split("p")
    return f"2^{int(exponent)}" if float.fromhex(mantissa) == 1.0 else number(value)
