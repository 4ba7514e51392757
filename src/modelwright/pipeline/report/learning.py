"""The report's sections on training: curves, summaries, anomalies, the history of the loss scale, skipped spikes,
rollbacks, and the list of steps to watch.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from modelwright.core.records import EventKind, column, read_records, summarize
from modelwright.pipeline.report.blocks import (
    Block,
    Chart,
    Excerpt,
    Fact,
    Fold,
    Note,
    Section,
    Table,
    compact,
    count,
    first_lines,
    number,
    percent,
    plural,
    seconds,
)
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.train.config import TrainConfig
from modelwright.train.techniques.adaptive_precision import CHANGES

NATS_PER_TOKEN = "nats per token"
_SUMMARIES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens per second",
    "step_time_s": "time per step, s",
    "data_wait_s": "waiting for data, s",
    "comm_s": "exchanging gradients, s",
    "mfu": "model FLOPs utilization",
}
_EVENTS_SHOWN = 40


def training_section(stage: StageData, config: TrainConfig, title: str, *, loss_unit: str = NATS_PER_TOKEN) -> Section:
    """Returns curves and figures of a training stage. title: title of the section. loss_unit: "" without a unit."""
    name, facts = stage.name, stage.facts
    if "skipped" in facts:
        return Section(name, title, [Note(str(facts["skipped"]).capitalize() + ".")])
    records, has_peak = stage.records(), bool(facts.get("peak_flops"))
    if has_peak:  # utilization relative to the stage's final peak rate, not to the rate known at each step
        live, peak = facts["live_peak_flops"], facts["peak_flops"]
        records = [
            record | {"mfu": record["mfu"] * record.get("peak_flops", live) / peak} if "mfu" in record else record
            for record in records
        ]
    blocks: list[Block] = [*_charts(records, name, config.max_grad_norm, has_peak, loss_unit)]
    blocks += [*scale_blocks(stage, records), *_format_blocks(stage, records)]
    rows: list[list[str]] = []
    for key, label in _SUMMARIES.items():
        summary = summarize([value for _, value in column(records, key)])
        # Without a peak rate utilization is 0, and a single process does not communicate.
        is_void = (key == "mfu" and summary.get("max") == 0) or (key == "comm_s" and facts["world_size"] == 1)
        if "mean" not in summary or is_void:
            continue
        if key == "loss" and loss_unit:
            label += f", {loss_unit}"
        parts = [summary[part] for part in ("mean", "std", "min", "p05", "p50", "p95", "p99", "max")]
        rows.append([label, *[percent(part) if key == "mfu" else number(part, 3) for part in parts]])
    header = ["metric", "mean", "std", "min", "p5", "median", "p95", "p99", "max"]
    blocks.append(Table(header, rows, "Metrics over all steps", numeric=range(1, 9)))
    blocks += [*watch_blocks(stage), *spike_blocks(stage)]
    formats = config.precision.formats
    described = ", ".join(f"{kind} {chosen.upper()}" for kind, chosen in formats.items())
    if len(set(formats.values())) == 1:
        described = f"all in {formats['ffn'].upper()}"
    lead = (
        f"{count(facts['num_steps'])} steps of {count(config.batch_tokens)} tokens, "
        f"{count(facts['num_tokens'])} tokens in all ({number(facts['num_epochs'], 3)} epochs), "
        f"trained in {seconds(facts['train_time_s'])}. "
        f"The precision policy was {config.precision.policy} ({described}) with FP32 master weights"
    )
    if config.gradient_accumulation_steps > 1:
        lead += f"; gradients were accumulated over {config.gradient_accumulation_steps} microbatches"
    rule = f" ({config.lr_scaling} scaling)" if config.lr_scaling != "none" else ""
    lead += f"; the peak learning rate was {number(config.peak_learning_rate, 3)}{rule}."
    if facts.get("taken_step") not in (None, facts["num_steps"]):
        lead += f" The result is the checkpoint of step {facts['taken_step']}, whose held-out loss was the lowest."
    return Section(name, title, blocks, lead)


def training_facts(data: RunData, stage: StageData) -> Sequence[Fact]:
    """Returns tokens, speed and utilization of a training stage."""
    facts = stage.facts
    if not facts.get("train_time_s"):
        return []
    speed = facts["num_tokens"] / facts["train_time_s"]
    result = [Fact("Pretraining", f"{compact(facts['num_tokens'])} tokens", f"{count(speed)} tokens per second")]
    if facts.get("peak_flops"):
        used_share = facts["model_flops"] / facts["train_time_s"] / facts["world_size"] / facts["peak_flops"]
        rate = compact(facts["peak_flops"])  # 52.6G, but 52.6 GFLOP/s in words
        rate = f"{rate[:-1]} {rate[-1]}" if rate[-1].isalpha() else f"{rate} "
        hint = f"of the {rate}FLOP/s measured for matrix products"
        result.append(Fact("Model FLOPs utilization", percent(used_share), hint))
    return result


def loss_highlight(stage: StageData, loss_unit: str) -> Sequence[Block]:
    """Returns the loss curve of a training; none without losses."""
    records = stage.records()
    if not column(records, "loss"):
        return ()
    return (_loss_chart(records, f"first-{stage.name}", loss_unit),)


def training_lines(data: RunData, stage: StageData) -> Sequence[str]:
    """Returns the line about a training on text that the terminal shows at the end of the run."""
    facts = stage.facts
    if not facts.get("train_time_s"):
        return ()
    tokens, parameters = compact(facts["num_tokens"]), compact(data.config.model.num_parameters)
    speed, time_s = count(facts["num_tokens"] / facts["train_time_s"]), seconds(facts["train_time_s"])
    return (f"learned  {tokens} tokens in {time_s}, {speed} tokens/s, with {parameters} parameters",)


def _charts(
    records: Sequence[dict[str, Any]], name: str, clip_norm: float, has_peak: bool, loss_unit: str
) -> list[Chart]:
    clip = {"level": clip_norm, "level_label": f"clipped at {clip_norm:g}"} if clip_norm else {}
    norm = line_chart(
        [Line("gradient norm", column(records, "grad_norm"), color=2)],
        name=f"{name}-norm", x_label="step", y_label="norm before clipping", log=True, **clip,
    )  # fmt: skip
    rate = line_chart(
        [Line("learning rate", column(records, "learning_rate"), color=3)],
        name=f"{name}-rate", x_label="step", y_label="learning rate",
    )  # fmt: skip
    rates = column(records, "tokens_per_s")
    title, y_label = "Throughput", "tokens per second"
    caption = f"The median is {count(summarize([y for _, y in rates]).get('p50', 0))} tokens per second"
    if has_peak:
        rates = column(records, "mfu")
        title, y_label, middle = (
            f"{title}: model FLOPs utilization",
            "MFU",
            summarize([y for _, y in rates]).get("p50", 0.0),
        )
        caption += (
            f"; the median utilization is {percent(middle)} of the matrix-product rate measured at the model's shapes"
        )
    lines = [Line("every step", rates, faint=True), Line("smoothed", smooth(rates))]
    speed = line_chart(
        lines, name=f"{name}-speed", x_label="step", y_label=y_label, percent=has_peak, from_zero=not has_peak
    )
    charts = [
        _loss_chart(records, name, loss_unit),
        Chart("Learning rate", rate),
        Chart("Gradient norm", norm),
        Chart(title, speed, f"{caption}."),
    ]
    if memory := [(step, value / 1e6) for step, value in column(records, "resident_bytes")]:
        svg = line_chart(
            [Line("resident memory", memory)], name=f"{name}-memory", x_label="step", y_label="MB", from_zero=True
        )
        charts.append(Chart("Memory", svg, "Resident memory of the first process, libraries included."))
    return charts


def _loss_chart(records: Sequence[dict[str, Any]], name: str, loss_unit: str) -> Chart:
    losses, heldout = column(records, "loss"), column(records, "heldout_loss")
    lines = [
        Line("every step", losses, faint=True),
        Line("training", smooth(losses)),
        Line("held out", heldout, marks=True, color=1),
    ]
    # The axis ends above the first loss, 99% of all and each held-out loss, so that a spike does not flatten the curve.
    finite, held = ([y for _, y in points if math.isfinite(y)] for points in (losses, heldout))
    top = max(finite[0], summarize(finite)["p99"], *held) * 1.05 if len(finite) >= 20 else 0.0
    svg = line_chart(lines, name=f"{name}-loss", x_label="step", y_label=loss_unit or "loss", top=top)
    words = f"The last training loss is {number(smooth(losses)[-1][1])} (smoothed)" if losses else ""
    words += f", the last held-out loss {number(heldout[-1][1])}." if heldout else "."
    return Chart("Loss", svg, words)


def _format_blocks(stage: StageData, records: Sequence[dict[str, Any]]) -> list[Block]:
    """Returns the modules that changed their number format, with reasons; empty if formats were fixed."""
    shares, changes = column(records, "low_precision_fraction"), read_records(stage.folder.path / CHANGES)
    if not shares:
        return []
    svg = line_chart(
        [Line("modules below FP32", shares)],
        name=f"{stage.name}-formats",
        x_label="step",
        y_label="share",
        percent=True,
    )
    chart = Chart("Number formats", svg, f"{plural(len(changes), 'format change')}.")
    if not changes:
        return [chart]
    lines = [
        f"step {one['step']:>6}  {one['part']:24} {one['from']} -> {one['to']}: {one['reason']}" for one in changes
    ]
    text = first_lines(lines, _EVENTS_SHOWN, "formats.jsonl")
    return [chart, Fold("Changes of number formats", [Excerpt("", text)])]


_CHANGES_SHOWN = 60


def scale_blocks(stage: StageData, records: Sequence[dict[str, Any]]) -> list[Block]:
    """Returns a chart of the loss scale, its overflows and changes; empty if losses were not scaled."""
    state = stage.facts.get("loss_scale")
    if not state:
        return []
    skipped = sum(bool(record.get("skipped")) for record in records)
    words = f"Loss scale: {number(state['value'])} at the end, {plural(state['num_overflows'], 'overflow')}, "
    words += f"{plural(len(state['history']) - 1, 'change')}; {count(skipped)} of the recorded steps made no update."
    scales = column(records, "loss_scale")
    lines = [Line("common", scales, color=0)] if scales else []
    chart = line_chart(lines, name=f"{stage.name}-scale", x_label="step", y_label="loss scale", log=True)
    changes = [f"step {step:>6}  {_power(value)}" for step, value in sorted(state["history"])]
    text = first_lines(changes, _CHANGES_SHOWN)
    blocks: list[Block] = [Chart("Loss scale", chart, words)]
    if len(changes) > 1:  # the first entry is the initial scale
        blocks.append(Fold("Changes of the loss scale", [Excerpt("", text)]))
    return blocks


def spike_blocks(stage: StageData) -> list[Block]:
    """Returns batches skipped as spikes, and rollbacks; empty without any."""
    events = stage.facts.get("left_out") or []
    if not events:
        return []
    spikes = [event for event in events if event["kind"] == "spike"]
    rollbacks = [event for event in events if event["kind"] == "rollback"]
    words = f"{plural(len(spikes), 'update')} skipped as spikes"
    if rollbacks:
        lost = sum(event["batches"][1] - event["batches"][0] + 1 for event in rollbacks)
        words += f"; {plural(len(rollbacks), 'rollback')} undid {plural(lost, 'update')}"
    lines: list[str] = []
    for event in events:
        first, last = event["batches"]
        if event["kind"] == "rollback":
            lines.append(f"step {event['step']:>6}  rolled back to step {first}: batches {first} to {last} undone")
            continue
        # JSON stores non-finite numbers as texts.
        loss, norm = (value if isinstance(value, str) else number(value) for value in (event["loss"], event["norm"]))
        lines.append(f"step {event['step']:>6}  batch {first} skipped: loss {loss}, gradient norm {norm}")
    text = first_lines(lines, _CHANGES_SHOWN, "loss_spikes.jsonl")
    return [Note(words + ".", "warning"), Fold("Skipped batches", [Excerpt("", text)])]


def _power(value: float) -> str:
    """Formats a loss scale, usually a power of two."""
    # The hexadecimal form has the exact exponent; log2 would round.
    mantissa, exponent = value.hex().split("p")
    return f"2^{int(exponent)}" if float.fromhex(mantissa) == 1.0 else number(value)


EVENT_KINDS = {
    "gradient_outlier": EventKind(
        "gradient-norm outliers",
        "Single ones are ordinary. Nothing needs to be done as long as the loss goes on falling; if it jumps at the "
        "same steps, lower learning_rate or max_grad_norm.",
        is_ordinary=True,
    ),
    "loss_spike": EventKind(
        "loss spikes",
        "If the loss does not return to its course, lower learning_rate, or have such batches skipped "
        "(loss_spikes.num_sigmas).",
    ),
    "nonfinite_step": EventKind(
        "steps that were not finite",
        "These updates were skipped. If there are many, lower learning_rate or use a wider number format "
        "(precision.policy).",
    ),
    "empty_step": EventKind(
        "steps without anything to learn", "Look at the examples of packed rows (modelwright report RUN)."
    ),
    "skipped_spike": EventKind(
        "spikes skipped",
        "Look at the batches that were skipped, in loss_spikes.jsonl; skip fewer with a higher loss_spikes.num_sigmas.",
    ),
    "rollback": EventKind("rollbacks to earlier weights", "If they recur, lower learning_rate."),
    "straggler": EventKind(
        "slow ranks", "Look at the load and the network of the hosts that are named (modelwright doctor)."
    ),
    "data_stall": EventKind(
        "data stalls",
        "Training waited for data: look at the disk and at other processes (modelwright doctor), or read rows ahead "
        "(cache.enabled).",
    ),
    "out_of_memory": EventKind(
        "steps out of memory", "Raise gradient_accumulation_steps, so that no step is made twice."
    ),
}
"""Kinds of events with their advice, by the name that a monitor reports."""


def watch_blocks(stage: StageData) -> list[Block]:
    """Returns the kinds of events with advice, and the first steps; amber only if a kind is not ordinary."""
    events = read_records(stage.folder.path / "anomalies.jsonl")
    if not events:
        return [Note("Watch list: no loss spike, gradient-norm outlier, non-finite step or data stall.", "good")]
    kinds = Counter(event["kind"] for event in events)
    notes: list[Block] = []
    for name, times in kinds.most_common():
        kind = EVENT_KINDS.get(name, EventKind(name, "See anomalies.jsonl."))
        text = f"Watch list: {kind.name}: {count(times)}. {kind.advice}"
        notes.append(Note(text, "plain" if kind.is_ordinary else "warning"))
    lines = [f"step {event['step']:>6}  {event['text']}" for event in events]
    return [
        *notes,
        Fold("Steps on the watch list", [Excerpt("", first_lines(lines, _EVENTS_SHOWN, "anomalies.jsonl"))]),
    ]
