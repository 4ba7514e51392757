"""What the alignment stages share: the reference model, and charts of rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from modelwright.core.errors import ConfigError
from modelwright.core.records import column
from modelwright.model.hf import deferred_model
from modelwright.pipeline.report.blocks import Block, Chart
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.stage_inputs import model_before
from modelwright.train.frozen_model import FrozenModel


def reference_model(inputs: StageInputs, stage: str, folder: str) -> FrozenModel:
    """The model of a folder, or, for "", the one that the stage starts from; frozen. Where the model in training is
    divided over ranks, it is, too.

    Raises `ConfigError` if the folder's model does not fit the tokens of the run.
    """
    start = inputs.parents[model_before(inputs.config, stage)]
    model = deferred_model(Path(folder) if folder else start)
    needed, found = inputs.config.model, model.config
    if found.vocab_size < needed.vocab_size or found.max_seq_len < needed.max_seq_len:
        raise ConfigError(
            f"{stage}.reference: {folder} has a vocabulary of {found.vocab_size} and a context of "
            f"{found.max_seq_len} tokens, the model in training {needed.vocab_size} and {needed.max_seq_len}; choose "
            "a reference with the tokenizer of this run"
        )
    parallel = inputs.config.parallel
    is_divided = parallel.zero_stage == 3 or parallel.tensor > 1 or parallel.pipeline > 1
    return FrozenModel(model, inputs.world, sharded=is_divided and inputs.world.size > 1)


def metric_charts(stage: StageData, charts: Mapping[str, Mapping[str, str]]) -> Sequence[Block]:
    """Charts of an objective's metrics, smoothed in training and as they are on held-out rows. charts: for each title
    the label of each metric.
    """
    records = stage.records()
    blocks: list[Block] = []
    for number, (title, metrics) in enumerate(charts.items()):
        lines: list[Line] = []
        for color, (metric, label) in enumerate(metrics.items()):
            if in_training := column(records, metric):
                lines.append(Line(label, smooth(in_training), color=color))
            if heldout := column(records, f"heldout/{metric}"):
                lines.append(Line(f"{label}, held out", heldout, marks=True, color=color))
        if any(line.points for line in lines):
            svg = line_chart(lines, name=f"{stage.name}-metrics-{number}", x_label="step", y_label=title.lower())
            blocks.append(Chart(title, svg))
    return blocks
