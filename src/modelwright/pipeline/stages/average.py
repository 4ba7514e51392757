"""average: the trained model and the one that the run started from, mixed weight by weight (WiSE-FT, Wortsman et al.
2022, https://arxiv.org/abs/2109.01903). The old model's share is the best of a grid on validation texts of old and new
tasks. Artifact: the model with its tokenizer in the Hugging Face layout.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, dump
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import EvaluateConfig, record_costs
from modelwright.model.hf import load_model
from modelwright.pipeline.stage import RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import fixed_estimate
from modelwright.pipeline.stages.init import INIT, save_model_folder
from modelwright.pipeline.stages.pack import model_before, needed_start, tokenizer_stage


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """Weight averaging with the model that the run started from."""

    old: tuple[str, ...] = ()
    """Files with validation texts of the old model's tasks."""
    new: tuple[str, ...] = ()
    """Files with validation texts of the tasks that were trained."""
    shares: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Shares of the old model to choose from; a single share is used without a choice."""
    margin: float = 0.02
    """Largest allowed growth of bits per byte on old texts, relative to the old model; among the shares within it, the
    stage chooses the one that is best for new texts."""

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise ConfigError(f"margin: must not be negative, got {self.margin:g}; 0.02 is 2 percent")
        if not self.shares or not all(0.0 <= share <= 1.0 for share in self.shares):
            raise ConfigError(f"shares: must name shares from 0 to 1, got {self.shares}; (0.0, 0.25, 0.5) is a choice")


def averaged(old: Mapping[str, Tensor], new: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Returns `share` x old + (1 - share) x new for each tensor, exactly old at 1 and new at 0."""
    if old.keys() != new.keys():
        raise ValueError("the two models have different tensors")
    # In FP32, and rounded once: mixing in a narrow format would lose what a small share adds
    return {name: torch.lerp(new[name].float(), tensor.float(), share).to(tensor.dtype) for name, tensor in old.items()}


def best_share(costs: Mapping[float, tuple[float, float]], before: float, margin: float) -> float:
    """Returns the share with the lowest cost of new texts among those that raise the cost of old texts, `before`, by at
    most the fraction `margin`; if all raise it more, the share with the lowest cost of old texts. Ties go to the
    smallest.

    costs: bits per byte of old and of new texts by share.
    """
    # Sorted, because `min` returns the first of equals
    within = [share for share in sorted(costs) if costs[share][0] <= (1.0 + margin) * before]
    if within:
        return min(within, key=lambda share: costs[share][1])
    return min(sorted(costs), key=lambda share: costs[share][0])


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    settings: AverageConfig = config.section(AVERAGE)
    trained = model_before(config, AVERAGE.name)
    if not config.init_from or trained == INIT.name:
        raise ConfigError("stages: average mixes a trained model with its start; name a training and set init_from")
    if len(settings.shares) > 1 and not (settings.old and settings.new):
        raise ConfigError("average.old: name validation files of old and of new tasks (average.new), or one share")
    digests: list[str] = []
    for path in (*settings.old, *settings.new):
        try:
            digests.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
        except OSError as error:
            raise ConfigError(
                f"average: {path} cannot be read ({error.strerror}); name a file of validation texts"
            ) from None

    def mix(context: StageContext) -> None:
        model = load_model(context.parents[trained])
        tokenizer = Tokenizer.load(context.parents[tokenizer_stage(config)])
        # Copies: `model` is overwritten with each average.
        old = {name: tensor.clone() for name, tensor in load_model(context.parents[INIT.name]).state_dict().items()}
        new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.eval()
        facts: dict[str, Any] = {}
        share = settings.shares[0]
        if len(settings.shares) > 1:
            configs = [
                SourceConfig(sources=files, validation_fraction=0.0, own_answers="train")
                for files in (settings.old, settings.new)
            ]
            groups = [list(read_documents(source, report=SourceReport())) for source in configs]
            costs: dict[float, tuple[float, float]] = {}
            for one in sorted({*settings.shares, 1.0}):  # 1 is the old model, the reference of the margin
                model.load_state_dict(averaged(old, new, one))
                # Of all documents together: of the answers in conversations, of the text in others
                bits: list[float] = []
                for group in groups:
                    rows = record_costs(model, tokenizer, group, EvaluateConfig(), progress=context.progress)
                    every = [row for of_one_kind in rows.values() for row in of_one_kind]
                    num_bytes = sum(row["num_bytes"] for row in every)
                    bits.append(sum(row["nats"] for row in every) / math.log(2) / num_bytes)
                costs[one] = (bits[0], bits[1])
            share = best_share({one: costs[one] for one in settings.shares}, costs[1.0][0], settings.margin)
            facts["costs"] = {f"{one:g}": {"old": bits[0], "new": bits[1]} for one, bits in costs.items()}
        model.load_state_dict(averaged(old, new, share))
        save_model_folder(model, tokenizer, context.output.path)
        context.output.facts |= facts | {"share": share, "num_parameters": model.config.num_parameters}
        context.progress.note(f"average: {share:g} of the old model")

    return Stage(
        name=AVERAGE.name,
        title=AVERAGE.title,
        settings=dump(settings) | {"sha256": digests},
        parents=(INIT.name, trained),
        run=mix,
    )


AVERAGE = StageSpec(
    name="average",
    title="Averaging with the initial model",
    config=AverageConfig,
    needs=lambda config: needed_start(config, "average"),
    only_if_named=True,
    model_title="averaged",
    build=_build,
    estimate=lambda config, run, rates: fixed_estimate("average", seconds=10.0),
)
