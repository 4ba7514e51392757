"""The whole page from a run's folder: figures at the top, then one section per part of the pipeline."""

from modelwright import __version__
from modelwright.core.rundir import RunDir
from modelwright.evaluate.suite import LOSSY
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import Fact, Page
from modelwright.pipeline.report.corpus import corpus_section, tokens_section
from modelwright.pipeline.report.environment import (
    cost_section,
    finished_stages,
    machine_words,
    settings_section,
    used,
)
from modelwright.pipeline.report.format import compact, count, flop_rate, kind_title, number, percent, plural, seconds
from modelwright.pipeline.report.learning import training_section
from modelwright.pipeline.report.results import (
    MODEL_TITLES,
    best_baseline,
    bits_rows,
    evaluation_section,
    int8_section,
    power,
    serving_section,
)
from modelwright.pipeline.report.run_data import RunData, read_run


def build_page(config: RunConfig, run: RunDir) -> Page:
    """The report of the stages that have finished so far."""
    data = read_run(config, run)
    sections = [
        corpus_section(data),
        tokens_section(data),
        training_section(data, "pretrain", "Pretraining"),
        training_section(data, "sft", "Fine-tuning"),
        evaluation_section(data),
        int8_section(data),
        serving_section(data),
        cost_section(data),
        settings_section(data),
    ]
    invocations = data.info.get("invocations", [])
    last = invocations[-1] if invocations else {}
    words = [last.get("started", "")[:10], machine_words(last)]
    return Page(
        title=config.name,
        subtitle=" · ".join(word for word in words if word),
        facts=_facts(data),
        sections=[section for section in sections if section is not None],
        footer=f"Written by Modelwright {__version__}"
        + (f", commit {last['commit']}" if last.get("commit") else "")
        + ". This file needs no network.",
        warnings=_warnings(data),
    )


def _facts(data: RunData) -> list[Fact]:
    facts = [_model_fact(data), *_training_facts(data), *_bits_facts(data)]
    results = (stage.json("results.json") if (stage := data.done("evaluate")) else {}) or {}
    if results and results["models"][results["final"]]["multiple_choice"]["questions"]:
        choice = results["models"][results["final"]]["multiple_choice"]
        p_value = power(choice["log10_p_value"])
        facts.append(
            Fact(
                "Multiple choice", percent(choice["accuracy"]), f"chance {percent(choice['chance'], 0)}, p = {p_value}"
            )
        )
    quantized = data.done("quantize")
    if quantized:
        comparison = quantized.json("results.json")["comparison"]
        ratio = comparison["reference_bytes"] / comparison["int8_bytes"]
        speeds = [pair["int8_tokens_per_s"] / pair["reference_tokens_per_s"] for pair in comparison["speed"]]
        facts.append(Fact("INT8", f"{ratio:.1f}x smaller", f"{min(speeds):.1f} to {max(speeds):.1f}x as fast"))
    finished = finished_stages(data)
    total = sum(used(stage)["wall_s"] for stage in finished)
    facts.append(Fact("Whole run", seconds(total), plural(len(finished), "stage")))
    return facts


def _model_fact(data: RunData) -> Fact:
    model = data.config.model
    shape = f"{model.num_layers} layers of width {model.model_dim}, {count(model.vocab_size)} tokens"
    return Fact("Parameters", compact(model.num_parameters), shape)


def _training_facts(data: RunData) -> list[Fact]:
    stage = data.done("pretrain")
    if stage is None or not stage.facts.get("train_time_s"):
        return []
    facts = stage.facts
    speed = facts["num_tokens"] / facts["train_time_s"]
    result = [Fact("Pretraining", f"{compact(facts['num_tokens'])} tokens", f"{count(speed)} tokens per second")]
    if facts.get("peak_flops"):
        used_share = facts["model_flops"] / facts["train_time_s"] / facts["world_size"] / facts["peak_flops"]
        hint = f"of the {flop_rate(facts['peak_flops'])} measured for matrix products"
        result.append(Fact("Model FLOPs utilization", percent(used_share), hint))
    return result


def _bits_facts(data: RunData) -> list[Fact]:
    stage = data.done("evaluate")
    if stage is None:
        return []
    rows = bits_rows(stage.json("results.json"))
    models = [name for name in rows if name in MODEL_TITLES.values()]
    facts = []
    for kind in next(iter(rows.values()), {}):
        best = min(models, key=lambda name: rows[name][kind])
        baseline = best_baseline(rows, kind)
        hint = f"{best}" + (f"; best baseline {baseline[1]:.2f} ({baseline[0]})" if baseline else "")
        facts.append(Fact(f"Bits per byte, {kind_title(kind)}", number(rows[best][kind], 3), hint))
    return facts


def _warnings(data: RunData) -> list[str]:
    """Warnings at the top of the page."""
    warnings = []
    missing = [name for name, stage in data.stages.items() if not stage.is_done and name != "report"]
    if missing:
        warnings.append(f"Not finished: {', '.join(missing)}. This report shows the finished stages.")
    for name in ("pretrain", "sft"):
        stage = data.done(name)
        if stage and stage.facts.get("num_skipped"):
            warnings.append(f"{name}: {stage.facts['num_skipped']} steps were skipped because values were not finite.")
    evaluated = data.done("evaluate")
    if evaluated and not all(model["lossless"] for model in evaluated.json("results.json")["models"].values()):
        warnings.append(f"evaluate: {LOSSY}.")
    return warnings
