"""Locations and names of an update's texts in its run."""

from pathlib import Path

from modelwright.core.artifacts import RunDir, is_finished

DATA_FOLDER, KIND = "data", "update-data"
HELDOUT_FILE = "heldout.jsonl"
CAPPED_FILE = "capped.jsonl"
"""Texts beyond the cap of their template, which the update does not train on: the gate uses them to measure the
influence of the others."""
OLD, NEW = "old", "new"
"""Sources of an update's documents; each has a separate file, `old.jsonl` or `new.jsonl`."""


def data_folder(run: RunDir) -> Path:
    return run.path / DATA_FOLDER


def is_update(run: RunDir) -> bool:
    """Returns whether the run is an update whose texts have been prepared."""
    return is_finished(data_folder(run))
