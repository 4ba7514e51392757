"""Type of an export of a model for other programs, and shared parts of those that write folders."""

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
    """Options of an export in addition to the format. dtype: one of `Export.dtypes`, "" for a format without any;
    overwrite: replace an earlier export.
    """

    dtype: str = ""
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Export:
    """A format in which models are written for other programs."""

    name: str
    """Name of the format after `--to`."""
    summary: str
    """Noun phrase for the written file or folder, for the command's help."""
    write: Callable[[FoundModel, Path, ExportOptions], Path]
    """Writes the model to a path and returns the path of the written file or folder."""
    target: Callable[[FoundModel, ExportOptions], Path]
    """Returns the default path."""
    dtypes: tuple[str, ...] = ()
    """Number formats for `--dtype`, the default first."""
    takes_integers: bool = False
    """True if quantized models can be written, too (`--int8`)."""
    needs_run: bool = False
    """True if only models of runs are written, because model folders have this format already."""


@contextmanager
def replaced(target: Path, *, holds: str, overwrite: bool) -> Generator[ArtifactDraft]:
    """Writes a folder atomically; it replaces an earlier export at most: one with the file `holds`."""
    # A mistyped path with --overwrite must not delete a folder of other files.
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
    # An export is not an artifact of a run: with a manifest, a later edit of its files would count as damage.
    (target / MANIFEST).unlink()


def require_exportable(source: Path) -> None:
    """Raises `ConfigError` for a model whose type `transformers`, and so llama.cpp, lacks."""
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
