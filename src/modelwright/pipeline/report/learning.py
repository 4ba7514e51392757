"""The report's sections on training: curves, summaries, anomalies."""

import math
from collections.abc import Sequence
from typing import Any

from modelwright.core.records import column, summarize
from modelwright.pipeline.report.blocks import Block, Chart, Excerpt, Fact, Fold, Note, Section, Table
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.format import compact, count, first_lines, flop_rate, number, percent, plural, seconds
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.report.stability import scale_blocks, spike_blocks
from modelwright.pipeline.report.watch import watch_blocks
from modelwright.precision.policy import PrecisionConfig
from modelwright.train.config import TrainConfig

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
    """Curves and figures of one training stage. title: of the section. loss_unit: "" for a number without one."""
    name = stage.name
    if "skipped" in stage.facts:
        return Section(name, title, [Note(str(stage.facts["skipped"]).capitalize() + ".")])
    records = _with_final_peak(stage)
    has_peak = bool(stage.facts.get("peak_flops"))
    blocks: list[Block] = [*_charts(records, name, config.max_grad_norm, has_peak, loss_unit)]
    blocks += [*scale_blocks(stage, records), *_format_blocks(stage, records)]
    blocks.append(_summary_table(records, stage.facts["world_size"], loss_unit))
    blocks += [*watch_blocks(stage), *spike_blocks(stage)]
    return Section(name, title, blocks, _lead(stage, config))


def training_facts(data: RunData, stage: StageData) -> Sequence[Fact]:
    """Tokens, speed and utilization of a training stage."""
    facts = stage.facts
    if not facts.get("train_time_s"):
        return []
    speed = facts["num_tokens"] / facts["train_time_s"]
    result = [Fact("Pretraining", f"{compact(facts['num_tokens'])} tokens", f"{count(speed)} tokens per second")]
    if facts.get("peak_flops"):
        used_share = facts["model_flops"] / facts["train_time_s"] / facts["world_size"] / facts["peak_flops"]
        hint = f"of the {flop_rate(facts['peak_flops'])} measured for matrix products"
        result.append(Fact("Model FLOPs utilization", percent(used_share), hint))
    return result


def loss_highlight(stage: StageData, loss_unit: str) -> Sequence[Block]:
    """The loss curve of a training; none without losses."""
    records = stage.records()
    if not column(records, "loss"):
        return ()
    return (_loss_chart(records, f"first-{stage.name}", loss_unit),)


def training_lines(data: RunData, stage: StageData) -> Sequence[str]:
    """What the terminal shows of a training on text when the run has ended."""
    facts = stage.facts
    if not facts.get("train_time_s"):
        return ()
    tokens, parameters = compact(facts["num_tokens"]), compact(data.config.model.num_parameters)
    speed, time_s = count(facts["num_tokens"] / facts["train_time_s"]), seconds(facts["train_time_s"])
    return (f"learned  {tokens} tokens in {time_s}, {speed} tokens/s, with {parameters} parameters",)


def _with_final_peak(stage: StageData) -> list[dict[str, Any]]:
    """The records with utilization relative to the stage's final peak rate, not the rate known at each step."""
    facts = stage.facts
    if not facts.get("peak_flops"):
        return stage.records()
    live, peak = facts["live_peak_flops"], facts["peak_flops"]
    return [
        record | {"mfu": record["mfu"] * record.get("peak_flops", live) / peak} if "mfu" in record else record
        for record in stage.records()
    ]


def _formats(precision: PrecisionConfig) -> str:
    """`attention BF16, ffn BF16, head FP32`, or one format if all are equal."""
    formats = precision.formats
    if len(set(formats.values())) == 1:
        return f"all in {formats['ffn'].upper()}"
    return ", ".join(f"{kind} {chosen.upper()}" for kind, chosen in formats.items())


def _lead(stage: StageData, config: TrainConfig) -> str:
    facts = stage.facts
    words = [
        f"{count(facts['num_steps'])} steps of {count(config.batch_tokens)} tokens, "
        f"{count(facts['num_tokens'])} tokens in all ({number(facts['num_epochs'], 3)} epochs), "
        f"trained in {seconds(facts['train_time_s'])}. "
        f"The precision policy was {config.precision.policy} ({_formats(config.precision)}) with FP32 master weights"
    ]
    if config.gradient_accumulation_steps > 1:
        words.append(f"; gradients were accumulated over {config.gradient_accumulation_steps} microbatches")
    rule = f" ({config.lr_scaling} scaling)" if config.lr_scaling != "none" else ""
    words.append(f"; the peak learning rate was {number(config.peak_learning_rate, 3)}{rule}.")
    if facts.get("taken_step") not in (None, facts["num_steps"]):
        words.append(
            f" The result is the checkpoint of step {facts['taken_step']}, whose held-out loss was the lowest."
        )
    return "".join(words)


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
    return [
        _loss_chart(records, name, loss_unit),
        Chart("Learning rate", rate),
        Chart("Gradient norm", norm),
        _speed_chart(records, name, has_peak),
    ]


def _loss_chart(records: Sequence[dict[str, Any]], name: str, loss_unit: str) -> Chart:
    losses, heldout = column(records, "loss"), column(records, "heldout_loss")
    lines = [
        Line("every step", losses, faint=True),
        Line("training", smooth(losses)),
        Line("held out", heldout, marks=True, color=1),
    ]
    svg = line_chart(lines, name=f"{name}-loss", x_label="step", y_label=loss_unit or "loss", top=_ceiling(losses))
    return Chart("Loss", svg, _loss_words(losses, heldout))


def _speed_chart(records: Sequence[dict[str, Any]], name: str, has_peak: bool) -> Chart:
    rates = column(records, "tokens_per_s")
    caption = f"The median is {count(summarize([y for _, y in rates]).get('p50', 0))} tokens per second"
    if not has_peak:
        lines = [Line("every step", rates, faint=True), Line("smoothed", smooth(rates))]
        svg = line_chart(lines, name=f"{name}-speed", x_label="step", y_label="tokens per second", from_zero=True)
        return Chart("Throughput", svg, caption + ".")
    mfu = column(records, "mfu")
    lines = [Line("every step", mfu, faint=True), Line("smoothed", smooth(mfu))]
    svg = line_chart(lines, name=f"{name}-speed", x_label="step", y_label="MFU", percent=True)
    middle = summarize([y for _, y in mfu]).get("p50", 0.0)
    caption += (
        f"; the median utilization is {percent(middle)} of the matrix-product rate measured at the model's shapes."
    )
    return Chart("Throughput: model FLOPs utilization", svg, caption)


def _ceiling(points: Sequence[tuple[int, float]]) -> float:
    """Upper end of the loss axis, such that a spike does not flatten the curve."""
    finite = [y for _, y in points if math.isfinite(y)]
    if len(finite) < 20:
        return 0.0
    return max(finite[0], summarize(finite)["p99"]) * 1.05


def _loss_words(losses: Sequence[tuple[int, float]], heldout: Sequence[tuple[int, float]]) -> str:
    words = f"The last training loss is {number(smooth(losses)[-1][1])} (smoothed)" if losses else ""
    return words + (f", the last held-out loss {number(heldout[-1][1])}." if heldout else ".")


def _summary_table(records: Sequence[dict[str, Any]], world_size: int, loss_unit: str) -> Table:
    """Omits utilization if no peak rate is known, and communication if there is one process."""
    rows = []
    for key, label in _SUMMARIES.items():
        summary = summarize([value for _, value in column(records, key)])
        if "mean" not in summary or (key == "mfu" and summary["max"] == 0) or (key == "comm_s" and world_size == 1):
            continue
        names = ("mean", "std", "min", "p05", "p50", "p95", "p99", "max")
        if key == "loss" and loss_unit:
            label += f", {loss_unit}"
        rows.append([label, *[percent(summary[part]) if key == "mfu" else number(summary[part], 3) for part in names]])
    header = ["metric", "mean", "std", "min", "p5", "median", "p95", "p99", "max"]
    return Table(header, rows, "Metrics over all steps", numeric=range(1, 9))


def _format_blocks(stage: StageData, records: Sequence[dict[str, Any]]) -> list[Block]:
    """Which parts changed their number format, and why; empty if formats were fixed."""
    shares, changes = column(records, "low_precision_fraction"), stage.format_changes()
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
