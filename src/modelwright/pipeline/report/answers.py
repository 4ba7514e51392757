"""The part of the report's benchmarks about held-out answers: perplexity before and after fine-tuning."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright.pipeline.report.blocks import Block, Fact, Table
from modelwright.pipeline.report.format import count, number


def answer_blocks(results: Mapping[str, Any], titles: Mapping[str, str]) -> list[Block]:
    """The table of the models' perplexities; empty without held-out conversations. titles: of the models, by stage."""
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
    """The perplexity of the final model's answers, beside that of the model before it."""
    tables = _tables(results)
    if not tables:
        return ()
    (_, last), before = tables[-1], tables[:-1]
    hints = [f"{titles[name]}: {number(table['perplexity'], 4)}" for name, table in before]
    return [Fact("Perplexity of answers", number(last["perplexity"], 4), "; ".join(hints))]


def _tables(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The summaries of the models that were scored on answers, in the order in which they were trained."""
    models: Mapping[str, Any] = results["models"]
    return [(name, model["answers"]) for name, model in reversed(list(models.items())) if model.get("answers")]
