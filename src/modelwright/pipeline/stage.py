"""A stage: one arrow of the pipeline, from its parents' artifacts to its own.

A stage is a plain function of a `StageContext`. The runner decides when it runs, whether it may be skipped, and what
happens to an unfinished one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from modelwright.core import config as core_config
from modelwright.core.artifacts import ArtifactDraft
from modelwright.core.progress import Progress
from modelwright.core.rundir import StageDir

FORMAT_VERSION = 1
"""Raised when the meaning of any artifact changes: every stage of an older run is then made again."""


class Ranks(Protocol):
    """The processes that work on this run together (implemented by `parallel.mesh.World`)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Arguments of a stage's function.

    `folder`: where checkpoints, metrics and the log go while it runs; `output`: the draft of its artifact, which only
    rank 0 may write to; `parents`: the finished artifacts by stage name; `digest`: of everything that determines the
    result, so that a checkpoint of another configuration is never used; `restart`: training whose checkpoints are all
    damaged starts over at step 0.
    """

    folder: StageDir
    output: ArtifactDraft
    parents: Mapping[str, Path]
    digest: str
    ranks: Any
    progress: Progress
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a run.

    `settings`: plain data, everything that determines the result besides the parents' contents; `every_rank`: whether
    all processes take part (training) or only the first (data); `version`: increased when this stage's output changes
    meaning.
    """

    name: str
    title: str
    settings: Any
    parents: tuple[str, ...]
    run: Callable[[StageContext], None]
    every_rank: bool = False
    version: int = 1

    def digest(self, contents: Mapping[str, str]) -> str:
        """Digest of the settings, the versions and the parents' content digests (`contents`, by name)."""
        return core_config.digest(
            {
                "stage": self.name,
                "version": [FORMAT_VERSION, self.version],
                "settings": self.settings,
                "parents": {name: contents[name] for name in self.parents},
            }
        )
