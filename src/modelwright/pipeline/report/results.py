"""The report's sections on results: benchmarks with their baselines, INT8 against FP32, served answers.

Its sections on training: curves, summaries, anomalies, the history of the loss scale, skipped spikes,
rollbacks, and the list of steps to watch.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from modelwright.core.records import EventKind, column, read_records, summarize
from modelwright.evaluate.multiple_choice import WITHOUT_QUESTION, best_rival
from modelwright.pipeline.report.blocks import (
    Block,
    Chart,
    Excerpt,
    Fact,
    Fold,
    Note,
    Samples,
    Section,
    Table,
    TextSample,
    compact,
    count,
    first_lines,
    kind_title,
    number,
    percent,
    plural,
    power_of_ten,
    seconds,
    size,
)
from modelwright.pipeline.report.charts import Line, bar_chart, line_chart, smooth
from modelwright.pipeline.report.page import answer_blocks, answer_facts
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stages.pack import FIRST_TRAINING
from modelwright.serve.load import expectation
from modelwright.train.config import TrainConfig
from modelwright.train.techniques.adaptive_precision import CHANGES


def evaluation_section(data: RunData, stage: StageData) -> Section:
    """Returns bits per byte with the baselines, and multiple choice with chance."""
    results, titles = stage.json("results.json"), data.model_titles
    models = results["models"]
    blocks: list[Block] = []
    has_bits = any(model["bits_per_byte"] for model in models.values())
    if has_bits:
        blocks.append(_bits_chart(results, titles, name="bits"))
    elif not any(model.get("answers") for model in models.values()):
        blocks.append(Note("No text was held out, so bits per byte were not measured."))
    if any(model["multiple_choice"]["questions"] for model in models.values()):
        blocks.append(_choice_chart(models, titles))
    if has_bits:
        blocks.append(_bits_table(results, titles))
    blocks += answer_blocks(results, titles)
    choice = models[results["final"]]["multiple_choice"]
    if choice["questions"]:
        rows: list[list[str]] = []
        for name, model in reversed(models.items()):
            table = model["multiple_choice"]
            interval = f"{percent(table['accuracy_low'])} to {percent(table['accuracy_high'])}"
            right = f"{count(table['correct'])} of {count(table['questions'])}"
            rows.append([titles[name], right, percent(table["accuracy"]), interval, power(table["log10_p_value"])])
        header = ["model", "right", "accuracy", "95% interval (Wilson)", "p against chance"]
        blocks.append(Table(header, rows, "Multiple choice in numbers", numeric=range(1, 5)))
        blocks.append(_choice_examples(stage, results["final"]))
    rule = {"byte": "byte", "token": "token", "pmi": "byte, minus that without the question"}.get(choice["score"], "")
    method = (
        "Every token of a held-out document is predicted once, with at most the model's context length before it. "
        "Bytes are those of the UTF-8 text, so models with different tokenizers and compressors can be compared. "
        f"Multiple choice ranks the candidates by log-likelihood per {rule}; the rule is set before the run."
    )
    blocks.append(Note(method))
    lead = (
        "Measured on held-out documents, which were never trained on. Lower bits per byte and perplexities are better."
    )
    return Section("evaluation", "Benchmarks", blocks, lead)


def evaluation_facts(data: RunData, stage: StageData) -> Sequence[Fact]:
    """Returns bits per byte of the best model in each domain and the multiple-choice accuracy, with the best rivals."""
    results = stage.json("results.json")
    rows = bits_rows(results, data.model_titles)
    models = [data.model_titles[name] for name in reversed(results["models"])]
    facts = []
    for kind in next(iter(rows.values()), {}):
        best = hint = min(models, key=lambda name: rows[name][kind])
        if baselines := {name: row[kind] for name, row in rows.items() if name not in models and kind in row}:
            rival = min(baselines, key=lambda name: baselines[name])
            hint += f"; best baseline {baselines[rival]:.2f} ({rival})"
        facts.append(Fact(f"Bits per byte, {kind_title(kind)}", f"{rows[best][kind]:.2f}", hint))
    facts += answer_facts(results, data.model_titles)
    choice = results["models"][results["final"]]["multiple_choice"]
    if choice["questions"]:
        hint = f"{rival_words(choice)}; chance {percent(choice['chance'], 0)}, p = {power(choice['log10_p_value'])}"
        facts.append(Fact("Multiple choice", percent(choice["accuracy"]), hint))
    return facts


def evaluation_highlight(data: RunData, stage: StageData) -> Sequence[Block]:
    """Returns the charts that compare the models with the baselines: while they learn and at the end."""
    results = stage.json("results.json")
    if not any(model["bits_per_byte"] for model in results["models"].values()):
        return ()
    final = _bits_chart(results, data.model_titles, name="first-bits")
    pretrained, baselines = data.done(FIRST_TRAINING), results.get("baselines") or {}
    heldout = column(pretrained.records(), "heldout_loss") if pretrained else []
    if len(heldout) < 2 or not baselines:
        return (final,)
    bigram: Mapping[str, Mapping[str, float]] = baselines["bigram"]["kinds"]
    num_bytes = {kind: table["bytes"] for kind, table in bigram.items()}
    total = sum(num_bytes.values())
    # The nats of the text, divided by those of a token
    num_tokens = sum(
        table["bits_per_byte"] * math.log(2) * table["bytes"] / table["nats_per_token"] for table in bigram.values()
    )
    bits_per_nat = num_tokens / total / math.log(2)
    lines = [Line("model", [(step, bits_per_nat * loss) for step, loss in heldout], marks=True)]
    rows = bits_rows(results, data.model_titles)
    for color, name in enumerate(("token bigram", "gzip, whole corpus", "xz, whole corpus"), start=1):
        level = sum(rows[name][kind] * amount for kind, amount in num_bytes.items()) / total
        lines.append(Line(name, [(heldout[0][0], level), (heldout[-1][0], level)], color=color))
    svg = line_chart(lines, name="first-learning", x_label="step", y_label="bits per byte")
    caption = "Held-out text of all kinds; the baselines are weighted by the bytes that were evaluated of each kind."
    return (Chart("Learning, next to baselines", svg, caption), final)


def evaluation_lines(data: RunData, stage: StageData) -> Sequence[str]:
    """Returns the lines that the terminal shows: one for each kind of text, with all baselines on the whole corpus, and
    one for the answers; none if no text was scored.
    """
    results = stage.json("results.json")
    rows, lines = bits_rows(results, data.model_titles), []
    for kind in next(iter(rows.values()), {}):
        shown = [f"{name.removesuffix(', whole corpus')} {row[kind]:.2f}" for name, row in rows.items() if kind in row]
        shown = [words for words in shown if "each document" not in words]
        lines.append(f"{kind:<8} bits per byte: {', '.join(shown)}")
    if not lines:
        return ()
    facts = [fact for fact in evaluation_facts(data, stage) if not fact.label.startswith("Bits per byte")]
    shown = [
        f"{fact.label.lower().removesuffix(' of answers')} {fact.value}" + (f" ({fact.hint})" if fact.hint else "")
        for fact in facts
    ]
    return [*lines, f"answers  {'; '.join(shown)}"] if shown else lines


def rival_words(choice: Mapping[str, Any]) -> str:
    """Compares the accuracy with the strongest rival: `below the best rival, shared parts of words, 44.3%`."""
    name, accuracy = best_rival(choice)
    place = "below" if choice["accuracy"] < accuracy else "above" if choice["accuracy"] > accuracy else "equal to"
    return f"{place} the best rival, {name}, {percent(accuracy)}"


def bits_rows(results: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Returns bits per byte by model and domain: the models, the bigram, the compressors. titles: names of the models,
    by stage.
    """
    models: dict[str, Any] = results["models"]
    rows: dict[str, dict[str, float]] = {
        titles[name]: {kind: table["bits_per_byte"] for kind, table in model["bits_per_byte"].items()}
        for name, model in reversed(models.items())
    }
    baselines = results.get("baselines") or {}
    if baselines:
        kinds = baselines["bigram"]["kinds"]
        rows["token bigram"] = {kind: table["bits_per_byte"] for kind, table in kinds.items()}
        for name in ("xz", "gzip"):
            for reading, words in (("concatenated", "whole corpus"), ("per_document", "each document")):
                rows[f"{name}, {words}"] = {
                    kind: table[name][reading] for kind, table in baselines["compressors"].items()
                }
    return rows


def int8_facts(data: RunData, stage: StageData) -> Sequence[Fact]:
    """Returns the factors by which the quantized model is smaller and faster."""
    comparison = stage.json("results.json")["comparison"]
    ratio = comparison["reference_bytes"] / comparison["int8_bytes"]
    speeds = [pair["int8_tokens_per_s"] / pair["reference_tokens_per_s"] for pair in comparison["speed"]]
    return [Fact(_integers(stage), f"{ratio:.1f}x smaller", f"{min(speeds):.1f} to {max(speeds):.1f}x as fast")]


def int8_section(data: RunData, stage: StageData) -> Section:
    """Returns size, speed and accuracy of the quantized model."""
    results, name = stage.json("results.json"), _integers(stage)
    agreement = results["comparison"]["agreement"]
    header = ["measure", "FP32", name, "change", "95% interval"]
    table = Table(header, _int8_rows(results), f"FP32 and {name} in numbers", numeric=range(1, 5))
    words = (
        f"Both models predict the same next token at {percent(agreement['same_first'])} of "
        f"{count(agreement['num_tokens'])} positions. The mean KL divergence is "
        f"{number(agreement['divergence'], 3)} nats, the largest difference of a logit "
        f"{number(agreement['max_logit_gap'], 3)}."
    )
    lead = f"{results['grid']} Backend: {results['backend']}."
    blocks: list[Block] = [table, Note(words)]
    if errors := results["layer_errors"]:
        mean = {name: statistics.mean(error[name] for error in errors.values()) for name in ("gptq", "nearest")}
        blocks.append(
            Note(
                f"GPTQ leaves {percent(mean['gptq'], 2)} of the layers' squared outputs on calibration rows as error, "
                f"rounding to the nearest code {percent(mean['nearest'], 2)} (means over layers)."
            )
        )
    return Section("int8", f"{name} beside FP32", blocks, lead)


def _integers(stage: StageData) -> str:
    """Returns the weights' number format: INT8, INT4."""
    return f"INT{stage.json('results.json')['bits']}"


NUM_SHOWN_ANSWERS = 3
"""Number of answers on the first screen of the report and on the terminal."""


def serving_highlight(data: RunData, stage: StageData) -> Sequence[Block]:
    """Returns the first answers of the server."""
    items = [
        TextSample(entry["question"], entry["answer"].strip() or "(an empty answer)")
        for entry in stage.json("answers.json")["answers"][:NUM_SHOWN_ANSWERS]
    ]
    return (Samples(items, title="Answers of the served model"),) if items else ()


def serving_section(data: RunData, stage: StageData) -> Section:
    """Returns the questions that the real server was asked, with its answers."""
    result = stage.json("answers.json")
    items = [
        TextSample(
            entry["question"],
            entry["answer"].strip() or "(an empty answer)",
            f"{entry['num_tokens']} tokens in {entry['latency_s']:.2f} s ({entry['finish_reason']})"
            + (f". Reference answer: {_short(entry['reference'])}" if entry["reference"] else ""),
        )
        for entry in result["answers"]
    ]
    total = sum(entry["num_tokens"] for entry in result["answers"])
    spent = sum(entry["latency_s"] for entry in result["answers"])
    asked = f"{plural(len(items), 'question')} {'was' if len(items) == 1 else 'were'} asked"
    stream = ""
    if streamed := result["streamed"]:
        same = "the same" if streamed["answer"] == result["answers"][0]["answer"] else "a different"
        text = f"; its first text arrived after {1000 * streamed['first_text_s']:.0f} ms."
        stream = (
            f"As a stream, the first question got {same} answer{text if streamed['answer'] else ', which was empty.'}"
        )
    lead = (
        f"The server was ready {seconds(result['start_s'])} after its start. {asked} through the official openai "
        f"client, one after the other; the server generated {number(total / max(spent, 1e-9), 3)} tokens per second. "
        f"{stream}"
    )
    hint = expectation(data.config.model.num_parameters)
    blocks: list[Block] = [Note(hint)] if hint else []
    blocks += [Samples(items), Note("The server drained and exited with code 143 after SIGTERM.", "good")]
    if result.get("left_out"):
        blocks.insert(0, Note(f"{result['left_out']}.", "warning"))
    return Section("serving", "Served answers", blocks, lead)


def _bits_chart(results: Mapping[str, Any], titles: Mapping[str, str], *, name: str) -> Chart:
    rows = bits_rows(results, titles)
    kinds = list(next(iter(rows.values())))
    series = [(kind_title(kind), [row.get(kind, math.nan) for row in rows.values()]) for kind in kinds]
    values = [[f"{value:.2f}" for value in column] for _, column in series]
    svg = bar_chart(list(rows), series, name=name, x_label="bits per byte (lower is better)", values=values)
    return Chart("Bits per byte on held-out text", svg)


def _choice_chart(models: dict[str, Any], titles: Mapping[str, str]) -> Chart:
    rows: dict[str, Any] = {titles[name]: model["multiple_choice"] for name, model in reversed(models.items())}
    last = list(rows.values())[-1]
    values = {name: table["accuracy"] for name, table in rows.items()}
    if WITHOUT_QUESTION in last["by_score"]:
        values["without the question"] = last["by_score"][WITHOUT_QUESTION]
    values |= {f"cue: {name.replace('_', ' ')}": value for name, value in last["cues"].items()}
    values["chance"] = last["chance"]
    words = [[percent(value) for value in values.values()]]
    svg = bar_chart(
        list(values), [("accuracy", [100 * value for value in values.values()])],
        name="choice", x_label="accuracy, %", values=words, largest=100,
    )  # fmt: skip
    caption = (
        f"{plural(last['questions'], 'question')} with four candidate answers each, about equally long and like the "
        "question. Without the question the final model takes the likeliest of the four answers. A cue chooses "
        "without a model: the longest answer, the shortest, or the one that shares most words, or parts of words, with "
        "the question."
    )
    return Chart("Multiple choice: which answer belongs to the question?", svg, caption)


def _bits_table(results: Mapping[str, Any], titles: Mapping[str, str]) -> Table:
    tables: list[tuple[str, Mapping[str, Any]]] = [
        (titles[name], model["bits_per_byte"]) for name, model in reversed(results["models"].items())
    ]
    tables.append(("token bigram", (results.get("baselines") or {}).get("bigram", {}).get("kinds", {})))
    rows: list[list[str]] = []
    for name, kinds in tables:
        for kind, table in kinds.items():
            interval = _interval(table, f"{table['bits_per_byte_low']:.3f} to {table['bits_per_byte_high']:.3f}")
            tokens, documents = f"{table['nats_per_token']:.3f}", count(table["documents"])
            bits = f"{table['bits_per_byte']:.3f}"
            rows.append([name, kind_title(kind), bits, interval, tokens, documents, size(table["bytes"])])
    header = ["model", "text", "bits per byte", "95% interval", "nats per token", "documents", "bytes"]
    caption = (
        "Intervals are bootstrapped over documents. The bigram is counted over all training tokens; the model was "
        "trained on those of its steps."
    )
    return Table(header, rows, "Bits per byte in numbers", caption, numeric=range(2, 7))


def _interval(table: Mapping[str, Any], words: str) -> str:
    # A bootstrap interval over documents is meaningless for a single document.
    return words if table["documents"] > 1 else "needs 2 documents"


def power(log10_value: float) -> str:
    """Formats a small probability, given its logarithm: `3.2×10⁻¹⁴`."""
    if log10_value > -3:
        return f"{10**log10_value:.3f}"
    # From the logarithm, because 10**log10_value of a strong test is 0 in a float.
    exponent = math.floor(log10_value)
    return power_of_ten(f"{10 ** (log10_value - exponent):.1f}", exponent)


NUM_QUESTIONS = 6
"""Number of benchmark questions that are shown."""


def _choice_examples(stage: StageData, model: str) -> Fold:
    items = []
    for record in stage.lines(f"{model}/questions.jsonl")[:NUM_QUESTIONS]:
        marks = []
        for number_, text in enumerate(record["candidates"]):
            sign = ("right, chosen" if number_ == record["choice"] else "right") if number_ == record["answer"] else ""
            sign = sign or ("chosen" if number_ == record["choice"] else "")
            marks.append(f"{'[' + sign + '] ' if sign else ''}{_short(text)}")
        items.append(Excerpt(record["question"], "\n".join(f"- {mark}" for mark in marks)))
    return Fold("Examples of questions, with the chosen answers", items)


def _int8_rows(results: Mapping[str, Any]) -> list[list[str]]:
    comparison, agreement = results["comparison"], results["comparison"]["agreement"]
    before, after = comparison["reference_bytes"], comparison["int8_bytes"]
    rows = [["weights", size(before), size(after), f"{before / after:.2f}x smaller", ""]]
    for pair in comparison["speed"]:
        fast, slow = pair["int8_tokens_per_s"], pair["reference_tokens_per_s"]
        # A forward pass over one token of each sequence is decoding, over several it is prefill.
        shape = f"decode, {plural(pair['num_streams'], 'sequence')}"
        if pair["num_tokens"] > 1:
            shape = f"prefill, {plural(pair['num_streams'], 'sequence')} of {count(pair['num_tokens'])} tokens"
        rows.append([f"tokens/s, {shape}", count(slow), count(fast), f"{fast / slow:.2f}x", ""])
    for kind, table in results["fp32"]["bits_per_byte"].items():
        after = results["int8"]["bits_per_byte"][kind]["bits_per_byte"]
        change = results["change"]["bits_per_byte"][kind]
        rows.append(
            [
                f"bits per byte, {kind_title(kind)}",
                f"{table['bits_per_byte']:.4f}",
                f"{after:.4f}",
                f"{change['difference']:+.4f}",
                _interval(table, f"{change['low']:+.4f} to {change['high']:+.4f}"),
            ]
        )
    before, after = results["fp32"]["multiple_choice"], results["int8"]["multiple_choice"]
    if before["questions"]:
        test = results["change"]["multiple_choice"]
        words = f"{test['won']} won, {test['lost']} lost"
        rows.append(["multiple choice", percent(before["accuracy"]), percent(after["accuracy"]), words, ""])
    before, after = agreement["reference_loss"], agreement["int8_loss"]
    rows.append(["loss, nats per token", number(before), number(after), f"{after - before:+.4f}", ""])
    return rows


def _short(text: str, most: int = 220) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + " …"


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
