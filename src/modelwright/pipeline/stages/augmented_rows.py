"""The batches of a training stage with changed copies of documents, where the section `augmentation` names methods."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from modelwright.core.config import digest
from modelwright.core.progress import Progress
from modelwright.core.seeds import derive_seed
from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.augment.row_copies import CopyRecipe
from modelwright.data.rows.batching.augmented import AugmentedLoader, PlannedRows
from modelwright.pipeline.augmentation_config import AugmentationConfig
from modelwright.pipeline.augmenting import make_methods
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import StageSpec
from modelwright.pipeline.stages.pack import PACK
from modelwright.train.runtime import TechniqueBuilder
from modelwright.train.state import TrainResult
from modelwright.train.techniques.augmentation_strength import augmentation_strength


@dataclass(frozen=True)
class MethodBuilder:
    """Builds the methods in a worker. settings: of the methods, as JSON."""

    names: tuple[str, ...]
    settings: str

    def __call__(self) -> list[Augmentation]:
        return make_methods(self.names, json.loads(self.settings))


def augmented(
    loader: PlannedRows, config: RunConfig, spec: StageSpec, tokenizer: Path, progress: Progress
) -> tuple[PlannedRows | AugmentedLoader, Sequence[TechniqueBuilder]]:
    """The loader with augmentation, and the technique that sets its strength; the loader itself where nothing is
    augmented. Raises `ConfigError` if a method cannot be built.
    """
    settings = config.augmentation
    if not is_augmented(config, spec):
        if settings.is_on and spec.rows is not None:
            progress.note(f"{spec.name}: the section augmentation does not act on rows of {spec.rows.title}")
        return loader, []
    assert spec.rows is not None
    assert spec.rows.encoder is not None
    methods = MethodBuilder(settings.methods, json.dumps(settings.settings, sort_keys=True))
    methods()  # complains before the training starts
    rows = loader.rows
    recipe = CopyRecipe(
        folder=rows.folder,
        seq_len=rows.seq_len,
        eos_id=rows.eos_id,
        seed=derive_seed(config.seed, spec.name, "augmentation"),
        encoder=spec.rows.encoder(config.section(PACK), tokenizer),
        methods=methods,
    )
    changed = AugmentedLoader(loader, recipe, num_workers=settings.num_workers)
    return changed, [partial(augmentation_strength, settings.strength, changed)]


def is_augmented(config: RunConfig, spec: StageSpec) -> bool:
    """Whether documents of the stage's rows change while it trains."""
    return config.augmentation.is_on and spec.rows is not None and spec.rows.encoder is not None


def augmentation_digest(config: AugmentationConfig) -> str:
    """A digest of what determines the copies."""
    return digest([config.methods, config.settings, config.strength])


def tell_cost(name: str, result: TrainResult, progress: Progress) -> None:
    """One line on what augmentation did and took."""
    summary = result.summary_of("augmentation_strength")
    if not summary:
        return
    methods = summary["methods"]
    changed = sum(cost["num_changed"] for cost in methods.values())
    by_method = ", ".join(
        f"{method} {cost['num_changed']:,}" for method, cost in methods.items() if cost["num_changed"]
    )
    progress.note(
        f"{name}: {changed:,} copies of documents ({by_method}) made in {summary['cpu_s']:,.1f} CPU seconds; steps "
        f"waited {summary['wait_s']:,.1f} s for them"
    )
