"""What a form of a model for other programs is, and what those that write folders share."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modelwright.core.artifacts import MANIFEST, ArtifactDraft, write_artifact
from modelwright.core.errors import ConfigError
from modelwright.model.hf_types.own import OWN_TYPE
from modelwright.pipeline.models import FoundModel


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What a user chooses beside the format. dtype: one of `Export.dtypes`, "" for a format without any; overwrite:
    replace an earlier export.
    """

    dtype: str = ""
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Export:
    """One form of a model."""

    name: str
    """Its word after `--to`."""
    summary: str
    """What is written, as a noun phrase for the command's help."""
    write: Callable[[FoundModel, Path, ExportOptions], Path]
    """Writes the model to a path and returns what it has written."""
    target: Callable[[FoundModel, ExportOptions], Path]
    """Where to, unless a user says so."""
    dtypes: tuple[str, ...] = ()
    """Number formats that `--dtype` chooses from, the default first."""
    takes_integers: bool = False
    """Whether a quantized model has this form, too (`--int8`)."""
    needs_run: bool = False
    """Whether only the model of a run is written, because model folders have this form already."""


@contextmanager
def replaced(target: Path, *, holds: str, overwrite: bool) -> Generator[ArtifactDraft]:
    """A folder that appears whole, in place of an earlier export at most: one with the file `holds`."""
    if overwrite and target.is_dir() and any(target.iterdir()) and not (target / holds).is_file():
        raise ConfigError(
            f"{target}: contains something other than a model, so it is not replaced; choose another folder"
        )
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: is a file, so it is not replaced by a folder; choose another one")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; choose another folder or add --overwrite")
    with write_artifact(target, kind="export", digest="") as draft:
        yield draft
    (target / MANIFEST).unlink()


def require_exportable(source: Path) -> None:
    """Raise `ConfigError` for a model that `transformers`, and so llama.cpp, has no type for."""
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") == OWN_TYPE:
        if settings["attention_gate"] == "none":
            raise ConfigError(
                f"model.head_budget: {source} computes a learned share of its heads ({settings['head_budget']:g}), and "
                "no model type of transformers does; export it to onnx or openvino, or train one with head_budget 1"
            )
        raise ConfigError(
            f"model.attention_gate: {source} has a gate on attention's output ({settings['attention_gate']}), and no "
            "model type of transformers has one; export it to onnx or openvino, or train one with attention_gate none"
        )
