"""The report's sections on the text: documents read and dropped with reasons, tokens and rows.

Charts of the text: documents left after each step, lengths, languages, personal data and clusters of near-duplicates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright.core.texts import redact_text
from modelwright.data.clean.folder import read_dropped
from modelwright.data.clean.steps.decontamination import DECONTAMINATION, PASSAGE_WORDS
from modelwright.data.clean.steps.duplicates import DUPLICATES
from modelwright.data.clean.steps.noise import low_recall, refusal
from modelwright.data.sources.corpora import CORPORA
from modelwright.data.sources.fields import printable
from modelwright.pipeline.report.blocks import (
    Block,
    Chart,
    Excerpt,
    Fold,
    Note,
    Section,
    Table,
    count,
    kind_title,
    number,
    percent,
    size,
)
from modelwright.pipeline.report.charts import bar_chart
from modelwright.pipeline.report.run_data import RunData, StageData

_EXCERPT_CHARS = 600
_EXAMPLES_AT_MOST = 40
NUM_DROPPED_EXAMPLES = 3
"""Number of examples of dropped text for each reason."""

_MOST_FIELDS = 50
_MOST_SHOWN = 12


def corpus_section(data: RunData, stage: StageData) -> Section:
    """Returns the documents read, kept and dropped, with reasons and examples."""
    sources, clean = stage.facts["sources"], stage.facts["clean"]
    rows: list[list[str]] = []
    for kind in sources["documents"]:
        splits = clean["kept"].get(kind, {})
        cells = [f"{count(sources['documents'][kind])} ({size(sources['bytes'][kind])})"]
        for split in ("train", "heldout"):
            entry = splits.get(split, {"documents": 0, "bytes": 0})
            cells.append(f"{count(entry['documents'])} ({size(entry['bytes'])})")
        left = sources["documents"][kind] - sum(entry["documents"] for entry in splits.values())
        rows.append([kind_title(kind), *cells, count(left)])
    header = ["kind", "read", "training", "held out", "dropped"]
    blocks: list[Block] = [Table(header, rows, "Documents by kind", numeric=range(1, 5)), _funnel(clean)]
    blocks += [*corpus_charts(clean), *_evaluation_sets(clean), *_noise_blocks(clean)]
    blocks += _dropped_blocks(stage, NUM_DROPPED_EXAMPLES)
    if reasons := {**sources["skipped"], **sources.get("passed_over", {})}:
        rows = [
            [reason, count(times), ", ".join(redact_text(where) for where in sources["examples"].get(reason, [])[:3])]
            for reason, times in reasons.items()
        ]
        blocks.append(Table(["reason", "records or files", "examples"], rows, "Not read", numeric=(1,)))
    left = [
        [redact_text(file), redact_text(name), f"{count(entry['records'] - entry['used'])} of {count(use['records'])}"]
        for file, use in sources.get("field_use", {}).items()
        for name, entry in use["fields"].items()
        if entry["used"] < entry["records"]
    ]
    if left:
        blocks.append(Table(["file", "field", "records"], left[:_MOST_FIELDS], "Fields of records that were not used"))
    places = ", ".join((CORPORA[s].title if s in CORPORA else "") or redact_text(s) for s in data.config.text_sources)
    kept = sum(entry["documents"] for splits in clean["kept"].values() for entry in splits.values())
    lead = (
        f"From {places}: {count(clean['num_documents'])} documents, {size(clean['num_bytes'])}; "
        f"{count(kept)} were kept. Held-out documents are never trained on."
    )
    return Section("data", "Data", blocks, lead)


def corpus_lines(data: RunData, stage: StageData) -> Sequence[str]:
    """Returns the lines about the text, and about fields that were not used, for the terminal at the end of the run."""
    kept: Mapping[str, Any] = stage.facts["clean"]["kept"]
    parts = [
        f"{size(sum(entry['bytes'] for entry in splits.values()))} of {kind_title(kind)}"
        for kind, splits in kept.items()
        if splits
    ]
    documents = sum(entry["documents"] for splits in kept.values() for entry in splits.values())
    lines = [f"read     {count(documents)} documents: {', '.join(parts)}"]
    uses = stage.facts["sources"].get("field_use", {}).values()
    unused = {name: "" for use in uses for name, one in use["fields"].items() if one["used"] < one["records"]}
    if unused:
        shown = ", ".join(map(printable, [*unused][:_MOST_SHOWN])) + ", ..." * (len(unused) > _MOST_SHOWN)
        lines.append(redact_text(f"         fields of records that were not used: {shown}"))
    return lines


def tokens_section(packed: StageData, tokenizer: StageData | None, titles: Mapping[str, str], row_len: int) -> Section:
    """Returns the section on the tokenizer and the packed rows.

    titles: purpose of each split of each set of rows, by its folder
    row_len: tokens of a row
    """
    rows = []
    for name, words in titles.items():
        facts = packed.facts.get(name)
        if facts:
            skipped = ", ".join(f"{reason}: {times}" for reason, times in facts["skipped"].items()) or "none"
            cells = [count(facts[key]) for key in ("num_sequences", "num_cut", "num_rows", "num_tokens", "num_targets")]
            rows.append([words, *cells, percent(facts["fill"], 2), skipped])
    header = ["rows for", "documents", "cut", "rows", "tokens", "predicted", "filled", "skipped"]
    caption = (
        "Rows are packed by best fit. Attention and loss stay within a document; the pieces of a cut document overlap "
        "by one token, so no prediction is lost. Fine-tuning predicts the answers only; a conversation that is longer "
        "than a row is truncated at its end."
    )
    blocks: list[Block] = [Table(header, rows, "Packed rows", caption, numeric=range(1, 7))]
    lead = f"Rows of {row_len} tokens."
    if tokenizer is not None and "bytes_per_token" in tokenizer.facts:
        per_token = tokenizer.facts["bytes_per_token"]
        shown = ", ".join(f"{number(value, 3)} for {kind_title(kind)}" for kind, value in per_token.items())
        lead = f"Byte-level BPE with {count(tokenizer.facts['vocab_size'])} tokens; bytes per token: {shown}. " + lead
    return Section("tokens", "Tokens", blocks, lead)


def _funnel(clean: Mapping[str, Any]) -> Table:
    """Returns the documents and bytes left after each step of cleaning that ran."""
    left = {"documents": clean["num_documents"], "bytes": clean["num_bytes"]}
    kept = {unit: sum(e[unit] for splits in clean["kept"].values() for e in splits.values()) for unit in left}
    rows: list[list[str]] = []
    for stage in clean.get("steps", clean["dropped"]):
        dropped = {unit: sum(entry[unit] for entry in clean["dropped"].get(stage, {}).values()) for unit in left}
        before = left
        left = {unit: left[unit] - dropped[unit] for unit in left}
        share = percent(dropped["documents"] / max(1, before["documents"]), 2)
        rows.append([stage, count(before["documents"]), count(dropped["documents"]), share, size(dropped["bytes"])])
    rows.append(["kept", count(kept["documents"]), "", "", size(kept["bytes"])])
    header = ["stage", "documents in", "dropped", "share", "bytes"]
    caption = f"{percent(kept['bytes'] / max(1, clean['num_bytes']), 1)} of the bytes read were kept."
    replaced = ", ".join(f"{count(times)} {kind}" for kind, times in sorted(clean.get("replaced", {}).items()))
    if replaced:
        caption += f" The stage privacy replaced {replaced}."
    failed = ", ".join(f"{name} {count(times)} times" for name, times in clean.get("failed_validators", {}).items())
    if failed:
        caption += f" Its validators that failed: {failed}."
    return Table(header, rows, "Cleaning, stage by stage", caption, numeric=range(1, 5), strong=[len(rows) - 1])


def _evaluation_sets(clean: Mapping[str, Any]) -> list[Block]:
    """Returns a table with the share of each evaluation set that was found in the corpus."""
    figures = clean.get("figures", {}).get(DECONTAMINATION.name, {})
    rows = [
        [redact_text(name), count(each["documents"]), percent(each["found"], 1), percent(each["passages_found"], 1)]
        for name, each in figures.items()
    ]
    header = ["evaluation set", "documents", "found", "passages found"]
    caption = f"Found: {PASSAGE_WORDS} words in a row of it were in the corpus, in documents that were dropped."
    return [Table(header, rows, "Evaluation sets in the corpus", caption, numeric=(1, 2, 3))] if rows else []


def _noise_blocks(clean: Mapping[str, Any]) -> list[Block]:
    noise = clean.get("noise")
    if not noise:
        return []
    why = refusal(noise)
    done = (
        f"{why[0].upper()}{why[1:]}."
        if why
        else (
            f"Noise: of {count(noise['judged'])} documents the classifier was uncertain about "
            f"{count(noise['uncertain'])} and left {count(noise['abstained'])} alone, whose form the trusted text does "
            "not have."
        )
    )
    text = (
        f"{done} The classifier takes {percent(noise['trusted_dropped'], 1)} of trusted text that it has not seen for "
        f"junk, and of junk from generators that it did not learn from {percent(noise['recall'], 1)}; where a tenth of "
        f"a corpus is such junk, {percent(noise['precision'], 1)} of what it would drop is junk"
        + (f", and {percent(noise['precision_low'], 1)} at least." if "precision_low" in noise else ".")
    )
    rows = [[name.replace("_", " "), percent(recall, 1)] for name, recall in noise["recall_by_kind"].items()]
    blocks: list[Block] = [Note(text), Table(["junk it did not learn from", "found"], rows, "Noise", numeric=(1,))]
    if names := low_recall(noise):
        blocks.append(Note(f"Warning: it hardly finds {', '.join(names)}."))
    return blocks


def _dropped_blocks(stage: StageData, num_examples: int) -> list[Block]:
    dropped = stage.facts["clean"]["dropped"]
    total = stage.facts["clean"]["num_documents"]
    if not dropped:
        return [Note("Nothing was dropped.")]
    rows = [
        [step, reason, count(entry["documents"]), percent(entry["documents"] / total, 2), size(entry["bytes"])]
        for step, reasons in dropped.items()
        for reason, entry in sorted(reasons.items(), key=lambda item: -item[1]["documents"])
    ]
    header = ["step", "reason", "documents", "share", "bytes"]
    blocks: list[Block] = [Table(header, rows, "Dropped documents by reason", numeric=(2, 3, 4))]
    examples: dict[tuple[str, str], list[Excerpt]] = {}
    num_reasons = sum(map(len, dropped.values()))
    for record in read_dropped(stage.folder.artifact):
        document, step, reason = record.document, record.step, record.reason
        of_reason = examples.setdefault((step, reason), [])
        if len(of_reason) < num_examples:
            detail = f": {redact_text(record.detail)}" if record.detail else ""
            text = document.text[:_EXCERPT_CHARS] + (" …" if len(document.text) > _EXCERPT_CHARS else "")
            of_reason.append(Excerpt(f"{step}: {reason} ({document.kind}, {redact_text(document.id)}){detail}", text))
        # The file may have gigabytes: it is read no further than the last reason's examples.
        if len(examples) == num_reasons and all(len(items) >= num_examples for items in examples.values()):
            break
    excerpts = [excerpt for of_reason in examples.values() for excerpt in of_reason][:_EXAMPLES_AT_MOST]
    return [*blocks, Fold("Examples of dropped text", excerpts)] if excerpts else blocks


_MOST_BARS = 12


def corpus_charts(clean: Mapping[str, Any]) -> list[Block]:
    """Returns the charts for which the report of cleaning has figures."""
    left = clean["num_documents"]
    steps, kept_by, dropped_by = ["read"], [left], [0]
    for step, reasons in clean["dropped"].items():
        dropped_by.append(sum(entry["documents"] for entry in reasons.values()))
        left -= dropped_by[-1]
        steps.append(f"after {step}")
        kept_by.append(left)
    charts: list[Block] = []
    if len(steps) > 1:
        pairs = zip(kept_by, dropped_by, strict=True)
        words = [count(kept) + (f" (−{count(gone)})" if gone else "") for kept, gone in pairs]
        series, values = [("left", kept_by), ("dropped", dropped_by)], [[""] * len(words), words]
        svg = bar_chart(steps, series, name="funnel", x_label="documents", values=values, stacked=True)
        charts.append(Chart("Documents left after each step", svg))
    kept, dropped = clean.get("kept_lengths", {}), clean.get("dropped_lengths", {})
    if lengths := sorted({int(length) for length in (*kept, *dropped)}):
        while lengths[-1] != lengths[0] and len(lengths) <= lengths[-1].bit_length() - lengths[0].bit_length():
            # Lengths without documents get a bar of zero, so that the axis has no gap.
            lengths = sorted({*lengths, *(length * 2 for length in lengths if length < lengths[-1])})
        names = [f"{count(length)} to {count(2 * length - 1)}" if length > 1 else "up to 1" for length in lengths]
        series = [("kept", [kept.get(str(length), 0) for length in lengths])]
        if dropped:
            series.append(("dropped", [dropped.get(str(length), 0) for length in lengths]))
        values = [[count(number) for number in numbers] for _, numbers in series]
        svg = bar_chart(names, series, name="lengths", x_label="documents", values=values)
        charts.append(Chart("Documents by length in characters", svg))
    caption = (
        "A sample: every 20th kept document of prose and pairs, by its beginning. Short texts are often mistaken, and "
        "parts of the corpus with fewer than 500 documents (shards of few or of long texts) are not sampled."
    )
    charts += _bars("Languages", "languages", _most_frequent(clean.get("languages", {})), caption)
    replaced = _most_frequent(clean.get("replaced", {}))
    charts += _bars("Personal data replaced in kept documents", "personal", replaced, x_label="values")
    sizes: Mapping[str, int] = clean.get("figures", {}).get(DUPLICATES.name, {}).get("cluster_sizes", {})
    clusters_by_size: dict[str, int] = {}
    for members, clusters in sorted((int(members), clusters) for members, clusters in sizes.items()):
        low = 1 << members.bit_length() - 1  # larger clusters together, by doubling sizes
        name = str(members) if members < 4 else f"{count(low)} to {count(2 * low - 1)}"
        clusters_by_size[name] = clusters_by_size.get(name, 0) + clusters
    bars, title = list(clusters_by_size.items()), "Clusters of near-duplicates by size"
    caption = "A cluster is a kept document with those that were dropped because they nearly repeat it."
    return [*charts, *_bars(title, "clusters", bars, caption, x_label="clusters")]


def _most_frequent(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the largest bars, and one for all others."""
    bars = sorted(counts.items(), key=lambda bar: (-bar[1], bar[0]))
    rest = sum(number for _, number in bars[_MOST_BARS:])
    return [*bars[:_MOST_BARS], *([("others", rest)] if rest else [])]


def _bars(
    title: str, name: str, bars: Sequence[tuple[str, int]], caption: str = "", *, x_label: str = "documents"
) -> list[Block]:
    if not bars:
        return []
    names, numbers = zip(*bars, strict=True)
    svg = bar_chart(names, [(x_label, numbers)], name=name, x_label=x_label, values=[list(map(count, numbers))])
    return [Chart(title, svg, caption)]
