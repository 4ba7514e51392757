"""The report's sections on results: benchmarks with their baselines, INT8 against FP32, served answers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from modelwright.core.records import column
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
    count,
    kind_title,
    number,
    percent,
    plural,
    power_of_ten,
    seconds,
    size,
)
from modelwright.pipeline.report.charts import Line, bar_chart, line_chart
from modelwright.pipeline.report.page import answer_blocks, answer_facts
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.serve.load import expectation


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
    from modelwright.pipeline.stages.pretrain import PRETRAIN  # whose file imports this one

    pretrained, baselines = data.done(PRETRAIN.name), results.get("baselines") or {}
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
