"""Packed rows of a run for commands that train outside of it: the run's own rows, or newly packed ones."""

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
    """Rows of a run's first training. folder: folder of `train` and `heldout`; parents: artifacts that a training
    without a stage before it reads, by stage name.
    """

    folder: Path
    parents: Mapping[str, Path]


def borrowed_rows(
    config: RunConfig, run: RunDir, folder: Path, words: Sequence[str], progress: Progress
) -> BorrowedRows:
    """Returns the rows of the first training of a resolved configuration, packed below `folder` unless the run has
    finished ones that match. words: command line, the command's name first.
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
