"""A training stage from another package: rows, settings, an objective, an estimate and a section of the report."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Split
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import numbered_batches
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report.blocks import Fact, Note, Section
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import Rates, RowSet, RunConfig
from modelwright.pipeline.stages.pack import PACK, needed_start
from modelwright.pipeline.stages.rows import PackJob
from modelwright.pipeline.stages.training import training_spec
from modelwright.train.config import TrainConfig
from modelwright.train.objective import BatchSource, Objective, Terms


@dataclass(frozen=True, kw_only=True)
class SmoothedConfig(TrainConfig):
    """Next-token prediction with smoothed labels (Szegedy et al. 2016, section 7)."""

    smoothing: float = 0.1
    """Share of the probability that is spread evenly over the vocabulary."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"smoothing: must be in [0, 1), got {self.smoothing}")


@dataclass(frozen=True)
class Smoothed(Objective):
    needs = frozenset[str]()
    metric_names = ("share_right",)
    source: BatchSource
    smoothing: float

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return numbered_batches(self.source, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"loss": (batch.labels_BT != IGNORED).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        loss = torch.nn.functional.cross_entropy(
            model.logits(output).transpose(1, 2), batch.labels_BT, label_smoothing=self.smoothing, reduction="sum"
        )
        is_right_BT = model.logits(output).argmax(-1) == batch.labels_BT
        return Terms({"loss": loss}, {"share_right": (is_right_BT.sum(), (batch.labels_BT != IGNORED).sum())})


def pack_reversed(job: PackJob, split: Split) -> None:
    """Each document from its end to its beginning."""
    texts = (document.text[::-1] for document in read_kept(job.clean, split=split, kinds=("prose",)))
    encoded = job.tokenizer.encode_documents(texts, num_threads=1)
    job.pack(f"{REVERSED_ROWS.name}/{split}", ((ids, None) for ids in encoded))


def estimate(config: RunConfig, run: RunDir, rates: Rates) -> StageEstimate:
    num_steps = config.section(SMOOTHED).resolve_num_steps(10)
    return StageEstimate(name=SMOOTHED.name, tokens=float(num_steps), flops=0.0, seconds=77.0 * 60, peak_bytes=2**20)


def report(data: RunData, stage: StageData) -> Section:
    """What all trainings show, the objective's metrics among it, and a line more."""
    smoothing, section = data.config.section(SMOOTHED).smoothing, _TRAINING.report(data, stage)
    assert section is not None
    return replace(section, blocks=[Note(f"{stage.facts['num_steps']} steps at {smoothing}."), *section.blocks])


REVERSED_ROWS = RowSet(name="reversed", title="reversed text", pack=pack_reversed)
_TRAINING = training_spec(
    name="smoothed",
    title="Training with smoothed labels",
    report_title="Smoothed labels",
    model_title="smoothed model",
    objective=lambda inputs: Smoothed(inputs.loader, inputs.training.smoothing),
    rows=REVERSED_ROWS,
    needs=lambda config: (PACK.name, *needed_start(config, "smoothed")),
    config=SmoothedConfig,
    follows="sft",
)
SMOOTHED = replace(
    _TRAINING,
    estimate=estimate,
    report=report,
    headline=lambda data, stage: [Fact("Smoothed", str(stage.facts["num_steps"]))],
)
