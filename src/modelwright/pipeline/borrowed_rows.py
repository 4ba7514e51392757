"""The packed rows of a run for commands that train beside it: the run's own, or ones made for the purpose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelwright.core.progress import Progress
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.run import execute
from modelwright.pipeline.runner import survey
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.specs import build_stages
from modelwright.pipeline.stages.stage_inputs import tokenizer_stage


@dataclass(frozen=True, kw_only=True)
class BorrowedRows:
    """Rows of a run's first training. folder: with `train` and `heldout`; parents: the artifacts that a training
    without a stage before it reads, by stage name.
    """

    folder: Path
    parents: Mapping[str, Path]


def borrowed_rows(
    config: RunConfig, run: RunDir, folder: Path, words: Sequence[str], progress: Progress
) -> BorrowedRows:
    """The rows of the first training of a resolved configuration. If the run has no finished ones that match it, they
    are made below `folder`. words: the command line, the command's name first.
    """
    rows, place = config.trainings[0].rows, run
    assert rows is not None
    if survey(run, build_stages(config, run)).states[PACK.name] != "done":
        place = RunDir(folder / "data")
        # All stages stay in the configuration, because the trainings decide which rows are packed.
        before = config.stage_names[: config.stage_names.index(PACK.name) + 1]
        data = replace(config, minutes=0.0)
        execute(data, place, only=before, origin=words[0], words=words, progress=progress)
    parents = {name: place.stage(name).artifact for name in (PACK.name, tokenizer_stage(config))}
    if config.init_from:
        parents[INIT.name] = Path(config.init_from)
    return BorrowedRows(folder=parents[PACK.name] / rows.name, parents=parents)
