"""A Hugging Face folder, which `transformers` loads."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from modelwright.core.artifacts import MANIFEST
from modelwright.core.hub import upload
from modelwright.pipeline.exports.export import CARD, Export, ExportOptions, model_card, replaced, require_exportable
from modelwright.pipeline.models import FoundModel
from modelwright.pipeline.report.run_data import read_run
from modelwright.pipeline.run_config import read_run_config


def export_hf(found: FoundModel, target: Path, *, overwrite: bool) -> Path:
    """Copies a model to `target`, atomically, with a model card if it is that of a run. Returns `target`."""
    source = found.source.folder
    require_exportable(source)
    with replaced(target, holds="config.json", overwrite=overwrite) as draft:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != MANIFEST:
                shutil.copyfile(path, draft.path / path.name)
        if found.run is not None:
            data = read_run(read_run_config(found.run.config), found.run)
            (draft.path / CARD).write_text(model_card(data, found.source.stage), encoding="utf-8")
    return target


EXPORT = Export(
    name="hf",
    summary="a folder that `transformers` loads",
    write=lambda found, target, options: export_hf(found, target, overwrite=options.overwrite),
    target=lambda found, _: found.run.path / "hf" if found.run else Path("hf"),
    needs_run=True,
)


def _upload(found: FoundModel, target: Path, options: ExportOptions) -> Path:
    with TemporaryDirectory(prefix="modelwright-hub-") as folder:
        upload(
            export_hf(found, Path(folder) / "model", overwrite=False), target.as_posix(), overwrite=options.overwrite
        )
    return target


HUB = Export(
    name="hub",
    summary="a model OWNER/NAME on a hub, private when it is new",
    write=_upload,
    target=lambda found, _: Path(found.source.name),  # which is refused, because it names no owner
)
