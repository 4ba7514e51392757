"""The whole report from a run's folder: figures at the top, then the section of each stage, and those on the run itself
(energy, cost, machine, settings), as one self-contained HTML file without scripts and network access. Also the lines
that the terminal shows at the end of a run.

The report's sections on the text: documents read and dropped with reasons, tokens and rows.

Charts of the text: documents left after each step, lengths, languages, personal data and clusters of near-duplicates.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from modelwright.core import VERSION
from modelwright.core.artifacts import RunDir
from modelwright.core.config import dump
from modelwright.core.texts import redact_plain, redact_text
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
    Fact,
    Fold,
    Note,
    Page,
    Section,
    Table,
    compact,
    count,
    kind_title,
    number,
    percent,
    plural,
    seconds,
    size,
)
from modelwright.pipeline.report.charts import bar_chart
from modelwright.pipeline.report.run_data import RunData, StageData, read_run
from modelwright.pipeline.stage import RunConfig, StageSpec
from modelwright.train.monitors.energy import ENERGY_FILE, MEMORY_WATTS_PER_GB, read_energy, total_energy

_TITLES = {
    "rapl": "processors (RAPL)",
    "rapl_memory": "memory (RAPL)",
    "nvml": "GPUs (NVML)",
    "cores_model": "cores (estimated)",
    "memory_model": "memory (estimated)",
}


def energy_section(stages: Sequence[StageData]) -> Section | None:
    """Returns energy and carbon dioxide of each training stage; None if no stage has trained."""
    entries = {stage.name: read_energy(stage.folder.path / ENERGY_FILE) for stage in stages}
    totals = {name: total_energy(of_stage) for name, of_stage in entries.items() if of_stage}
    if not totals:
        return None
    rows: list[list[str]] = []
    for name, total in totals.items():
        all_joules = sum(total.joules.values())
        sources = (f"{_TITLES[one]} {percent(value / all_joules, 0)}" for one, value in total.joules.items())
        figures = _energy_cells(total.total_joules, total.joules_per_token, total.co2_g, total.seconds)
        rows.append([name, *figures, percent(total.measured_share, 0), ", ".join(sources)])
        if other := total.codecarbon:
            figures = _energy_cells(other.joules, other.joules / max(1, other.num_tokens), other.co2_g, other.seconds)
            rows.append(["codecarbon, an estimate", *figures, "–", f"whole machine, {other.country}"])
    header = ["stage", "energy", "per token", "CO₂", "mean power", "measured", "sources"]
    # Of the latest training: all share the section `energy` unless they override it.
    last = [of_stage[-1] for of_stage in entries.values() if of_stage][-1]
    terms = (
        f"Energy is what the sources say times {last['pue']:g} (PUE: cooling and losses of the data center), carbon "
        f"dioxide {last['carbon_g_per_kwh']:g} g per kWh; both are settings (energy). RAPL and NVML are "
        "readings of a whole host or GPU, other processes included. Estimated: the process's CPU time times "
        f"{last['watts_per_core']:g} W per core, its resident memory times {MEMORY_WATTS_PER_GB:g} W per GB "
        "(Lannelongue et al. 2021); idle parts, disks, network and fans do not count. Work that an interruption undid "
        "counts."
    )
    blocks: list[Block] = [Table(header, rows, "Energy of training", numeric=range(1, 6)), Note(terms)]
    if others := {name: total.codecarbon for name, total in totals.items() if total.codecarbon}:
        versions = ", ".join(dict.fromkeys(other.version for other in others.values()))
        processes = ", ".join(f"{other.num_processes} of {name}" for name, other in others.items())
        terms = (
            f"codecarbon {versions} follows the whole first host, other processes included, models what it cannot "
            "read, and takes the country's mean intensity; the PUE is in its figures, too. They are of the process "
            f"starts with energy.country: {processes}."
        )
        blocks.append(Note(terms))
    return Section("energy", "Energy and carbon dioxide", blocks)


def energy_facts(stages: Sequence[StageData]) -> Sequence[Fact]:
    """Returns the energy of all trainings together, and the share of it that was measured."""
    totals = [total_energy(entries) for stage in stages if (entries := read_energy(stage.folder.path / ENERGY_FILE))]
    if not totals:
        return ()
    used = sum(total.total_joules for total in totals)
    measured = sum(total.measured_share * total.total_joules for total in totals) / max(used, 1e-9)
    hint = (
        f"{number(sum(total.co2_g for total in totals), 3)} g CO₂; {percent(measured, 0)} measured, the rest estimated"
    )
    return (Fact("Energy of training", joules(used), hint),)


def _energy_cells(all_joules: float, joules_per_token: float, co2_g: float, duration_s: float) -> list[str]:
    mean_watts = all_joules / max(1e-9, duration_s)
    return [
        joules(all_joules), f"{number(joules_per_token, 3)} J", f"{number(co2_g, 3)} g", f"{number(mean_watts, 3)} W"
    ]  # fmt: skip


def joules(value: float) -> str:
    """Formats energy: `512 J`, `3.4 kJ`, `1.2 kWh`."""
    if value >= 3.6e5:
        return f"{number(value / 3.6e6, 3)} kWh"
    return f"{number(value / 1e3, 3)} kJ" if value >= 1e3 else f"{number(value, 3)} J"


def cost_section(stages: Sequence[StageData]) -> Section:
    """Returns time and peak memory of finished stages."""
    wall = [used(stage)["wall_s"] for stage in stages]
    peak = [used(stage)["peak_bytes"] / 1e6 for stage in stages]
    names = [stage.name for stage in stages]
    blocks: list[Block] = []
    if stages:
        time_svg = bar_chart(
            names, [("seconds", wall)], name="time", x_label="seconds", values=[[seconds(value) for value in wall]]
        )
        memory_svg = bar_chart(
            names, [("MB", peak)], name="memory", x_label="MB", values=[[size(value * 1e6) for value in peak]]
        )
        rows: list[list[str]] = []
        for stage in stages:
            use = used(stage)
            share = percent(use["wall_s"] / sum(wall), 0) if sum(wall) else ""
            cores = f"{use['cpu_s'] / use['wall_s']:.2f}" if use["wall_s"] else ""
            attempts = str(len(stage.attempts))
            rows.append([stage.name, seconds(use["wall_s"]), share, cores, size(use["peak_bytes"]), attempts])
        rows.append(["total", seconds(sum(wall)), "", "", "", ""])
        header = ["stage", "time", "share", "cores busy", "peak memory", "attempts"]
        blocks += [
            Chart("Time per stage", time_svg),
            Chart("Peak memory per stage", memory_svg, "Resident memory of the process, libraries included."),
            Table(header, rows, "Stages in numbers", numeric=range(1, 6), strong=(len(rows) - 1,)),
        ]
    cut = sum(entry["state"] in ("killed", "stopped", "failed") for stage in stages for entry in stage.attempts)
    if cut:
        verb = "was" if cut == 1 else "were"
        blocks.append(Note(f"{plural(cut, 'attempt')} {verb} interrupted before the stage finished and then resumed."))
    return Section("cost", "Time and memory", blocks)


def used(stage: StageData) -> dict[str, float]:
    """Returns wall time and CPU time of all attempts together, and the largest peak memory, child processes
    included.
    """
    return {
        "wall_s": sum(entry["wall_s"] for entry in stage.attempts),
        "cpu_s": sum(entry["cpu_s"] for entry in stage.attempts),
        "peak_bytes": max(max(entry["peak_bytes"], entry.get("child_peak_bytes", 0)) for entry in stage.attempts),
    }


def settings_section(data: RunData) -> Section:
    """Returns machine, versions, command lines, and the whole configuration."""
    invocations = data.info.get("invocations", [])
    blocks: list[Block] = []
    if invocations:
        last = invocations[-1]
        box, threads = last["hardware"], plural(last["hardware"].get("num_threads", 1), "thread")
        rows = [
            ["processor", f"{box['processor']}, {plural(box['cores'], 'core')}"],
            ["memory", size(box["memory_bytes"])],
            ["device", f"{box.get('device', '')}, {threads}, {plural(last['world_size'], 'process')}"],
            ["system", f"{box['system']}, Python {box['python']}"],
            ["versions", ", ".join(f"{name} {version}" for name, version in last["versions"].items())],
        ]
        if last.get("commit"):
            rows.append(["commit", last["commit"]])
        blocks.append(Table(["", ""], rows, "Machine and versions"))
        commands = "\n".join(f"{entry['started']}  {' '.join(entry['command'])}" for entry in invocations)
        blocks.append(Fold("Command lines", [Excerpt("", commands)]))
    text = yaml.safe_dump(redact_plain(dump(data.config)), sort_keys=False, allow_unicode=True)
    blocks.append(Fold("Resolved configuration, which can be run again", [Excerpt("config.yaml", text)]))
    return Section("settings", "Machine and settings", blocks)


def machine_words(info: Mapping[str, Any]) -> str:
    """Describes a machine: `AMD EPYC, 2 threads, 24 GB memory`."""
    box = info.get("hardware", {})
    if not box:
        return ""
    is_cuda = str(box.get("device", "")).startswith("cuda")
    device = "CUDA" if is_cuda else plural(box.get("num_threads", 1), "thread")  # threads of all processes together
    ranks = f" x {plural(info['world_size'], 'process')}" if info.get("world_size", 1) > 1 else ""
    return f"{box['processor']}, {device}{ranks}, {size(box['memory_bytes'])} memory"


def render(page: Page) -> str:
    """Returns the page as HTML. All text is escaped; only the charts' SVG is inserted unchanged."""
    # Escaped, because texts and paths come from users' data; strict, so that a misspelled name is an error.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)

    def runs(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
        # Neighbors of the same kind form a group, so that charts can share a row.
        return [(kind, list(group)) for kind, group in groupby(blocks, key=lambda block: block.kind)]

    environment.filters["runs"] = runs
    source = files("modelwright.pipeline.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    style = files("modelwright.serve").joinpath("static/pages.css").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page, style=style)


def build_page(config: RunConfig, run: RunDir, *, without: StageSpec) -> Page:
    """Returns the report of the stages that have finished so far.

    without: the stage that writes the report, which has not finished when the report is first written
    """
    data = read_run(config, run)
    specs = [spec for spec in config.stages if spec.name != without.name]
    finished = [(spec, stage) for spec in specs if (stage := data.done(spec.name))]
    timed = [stage for _, stage in finished if stage.attempts]
    sections = [spec.report(data, stage) for spec, stage in finished]
    warnings = [f"{spec.name}: {text}" for spec, stage in finished for text in spec.warnings(stage)]
    invocations = data.info.get("invocations", [])
    last = invocations[-1] if invocations else {}
    words = [last.get("started", "")[:10], machine_words(last)]
    highlights = [block for spec, stage in finished for block in spec.highlight(data, stage)]
    charts_first = sorted(highlights, key=lambda block: block.kind != "chart")  # next to each other, then the rest
    overview = Section("overview", "At a glance", charts_first) if highlights else None
    if missing := [spec.name for spec in specs if not data.done(spec.name)]:
        warnings.insert(0, f"Not finished: {', '.join(missing)}. This report shows the finished stages.")
    model, wall_s = config.model, sum(used(stage)["wall_s"] for stage in timed)
    shape = f"{model.num_layers} layers of width {model.model_dim}, {count(model.vocab_size)} tokens"
    return Page(
        title=config.name,
        subtitle=" · ".join(word for word in words if word),
        facts=[
            Fact("Parameters", compact(model.num_parameters), shape),
            *(fact for spec, stage in finished for fact in spec.headline(data, stage)),
            Fact("Whole run", seconds(wall_s), plural(len(timed), "stage")),
            *energy_facts(timed),
        ],
        sections=[
            *filter(None, [overview, *sections, cost_section(timed), energy_section(timed)]),
            settings_section(data),
        ],
        footer=f"Written by Modelwright {VERSION}"
        + (f", commit {last['commit']}" if last.get("commit") else "")
        + ". This file needs no network.",
        warnings=warnings,
    )


def answer_blocks(results: Mapping[str, Any], titles: Mapping[str, str]) -> list[Block]:
    """Returns the table of the models' perplexities; empty without held-out conversations. titles: names of the models,
    by stage.
    """
    rows = [
        [
            titles[name],
            number(table["perplexity"]),
            f"{number(table['perplexity_low'])} to {number(table['perplexity_high'])}",
            f"{table['nats_per_token']:.3f}",
            f"{table['bits_per_byte']:.3f}",
            count(table["conversations"]),
            count(table["tokens"]),
        ]
        for name, table in _tables(results)
    ]
    if not rows:
        return []
    header = ["model", "perplexity", "95% interval", "nats per token", "bits per byte", "conversations", "tokens"]
    caption = "Of the assistant's tokens in held-out conversations, in the model's own chat template."
    return [Table(header, rows, "Held-out answers", caption, numeric=range(1, 7))]


def answer_facts(results: Mapping[str, Any], titles: Mapping[str, str]) -> Sequence[Fact]:
    """Returns the perplexity of the final model's answers, with that of the model before it."""
    tables = _tables(results)
    if not tables:
        return ()
    (_, last), before = tables[-1], tables[:-1]
    hints = [f"{titles[name]}: {number(table['perplexity'], 4)}" for name, table in before]
    return [Fact("Perplexity of answers", number(last["perplexity"], 4), "; ".join(hints))]


def _tables(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the summaries of the models that were scored on answers, in the order in which they were trained."""
    models: Mapping[str, Any] = results["models"]
    return [(name, model["answers"]) for name, model in reversed(list(models.items())) if model.get("answers")]


LABEL_LEN = 8
"""Width of the first word of a line in characters, so that the rest is aligned."""


def closing_lines(config: RunConfig, run: RunDir) -> Sequence[str]:
    """Returns the lines of each finished stage, or its figures if it has no lines, and last the time of each stage, all
    its attempts together.
    """
    data = read_run(config, run)
    finished = [(spec, stage) for spec in config.stages if (stage := data.done(spec.name))]
    lines = [
        line
        for spec, stage in finished
        for line in spec.closing(data, stage) or _fact_lines(spec.headline(data, stage), width=LABEL_LEN)
    ]
    times = {stage.name: used(stage)["wall_s"] for _, stage in finished if stage.attempts}
    parts = ", ".join(f"{name} {seconds(wall_s)}" for name, wall_s in times.items())
    return [*lines, f"{'time':<{LABEL_LEN}} {seconds(sum(times.values()))}: {parts}"] if times else lines


def figures(data: RunData) -> list[str]:
    """Returns the figures of the finished stages, one line each."""
    finished = [(spec, stage) for spec in data.config.stages if (stage := data.done(spec.name))]
    facts = [fact for spec, stage in finished for fact in spec.headline(data, stage)]
    return _fact_lines(facts, width=max((len(fact.label) for fact in facts), default=0) + 1)


def _fact_lines(facts: Sequence[Fact], *, width: int) -> list[str]:
    return [f"{fact.label:<{width}} {fact.value}" + (f" ({fact.hint})" if fact.hint else "") for fact in facts]


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
