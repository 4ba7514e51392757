"""Where the texts of an update lie in its run, and what they are called there."""

from pathlib import Path

from modelwright.core.artifacts import is_finished
from modelwright.core.rundir import RunDir

DATA_FOLDER, KIND = "data", "update-data"
HELDOUT_FILE = "heldout.jsonl"
CAPPED_FILE = "capped.jsonl"
"""Texts beyond the cap of their template, which the update does not learn from: the gate asks whether the model did."""
OLD, NEW = "old", "new"
"""The sources of an update's documents; each has a file of its own, `old.jsonl` and `new.jsonl`."""


def data_folder(run: RunDir) -> Path:
    return run.path / DATA_FOLDER


def is_update(run: RunDir) -> bool:
    """Whether the run is an update whose texts are chosen."""
    return is_finished(data_folder(run))
