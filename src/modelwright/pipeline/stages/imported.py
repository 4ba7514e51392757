"""`rows_from`: a run that uses the results of another run's data stages instead of making its own.

The stages clean, tokenize and pack copy the other run's artifacts, from a folder or a store, and check every file
against its manifest. Only the training rows and their images stay where they are: the cache reads them from there
(docs/data.md).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from modelwright.core.artifacts import MANIFEST, ArtifactError, Manifest, damage, parse_manifest, write_atomic
from modelwright.core.config import ConfigError, load_yaml
from modelwright.core.texts import redact_text
from modelwright.data.images.store import FILE, ImageIndex, images_folder
from modelwright.data.rows.cache.layout import ROWS_AT, ColdStore, is_remote
from modelwright.data.rows.loader import row_layout
from modelwright.data.rows.pack import INDEX
from modelwright.data.tokenizer.tokenizer import Tokenizer, tokenizer_difference
from modelwright.pipeline.stage import RowSet, RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import BYTES_PER_TOKEN, text_bytes

TRAIN = "train"
IMAGES = images_folder(Path(), TRAIN).name
"""Folders of an artifact with training rows, and with their images."""
Check = Callable[[StageContext, Manifest], None]


def imported_stage(
    config: RunConfig,
    spec: StageSpec,
    *,
    settings: Mapping[str, Any] | None = None,
    parents: tuple[str, ...] = (),
    check: Check = lambda context, manifest: None,
) -> Stage:
    """Returns a stage that copies the artifact of the same stage of the run that `rows_from` names. settings: further
    settings on which its use depends; check: raises `ConfigError` if it does not fit this run.
    """

    def copy(context: StageContext) -> None:
        url, stage, output = config.rows_from, spec.name, context.output
        store = ColdStore(url)
        manifest = read_source_manifest(url, stage)
        check(context, manifest)
        copied = dict(manifest.files)
        for name in manifest.files:
            path = PurePosixPath(name)
            is_rows = path.parent.name == TRAIN and path.name.startswith(("tokens-", "mask-"))
            if is_rows or (path.parent.name == IMAGES and path.name == FILE):
                # Read by training from the other run, through the cache: it may be too large for this machine.
                del copied[name]
        total_bytes, num_bytes = sum(int(entry["bytes"]) for entry in copied.values()), 0
        context.progress.begin(f"{stage} from {redact_text(url)}", total_bytes, "bytes")
        for name, entry in copied.items():
            target = output.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                store.copy(f"{stage}/artifact/{name}", target)
            except FileNotFoundError:
                raise ArtifactError(f"{url}/{stage}/artifact/{name}: is missing; copy it there again") from None
            if problem := damage(target, int(entry["bytes"]), str(entry["sha256"])):
                raise ArtifactError(f"{url}/{stage}/artifact/{name}: {problem}; copy it there again")
            num_bytes += int(entry["bytes"])
            context.progress.advance(num_bytes)
        context.progress.end()
        output.facts |= manifest.facts
        # The large files are read from the other run: their address is written next to the copied index, and read at
        # once, so that an unreadable file fails here and not in training.
        for folder in sorted([*output.path.glob(f"*/{TRAIN}"), *output.path.glob(f"*/{IMAGES}")]):
            place = f"{url}/{stage}/artifact/{folder.relative_to(output.path).as_posix()}"
            write_atomic(folder / ROWS_AT, json.dumps({"url": place}))
            try:
                if folder.name == IMAGES:
                    ImageIndex.read(folder)
                elif is_remote(url):
                    row_layout(folder)
            except ArtifactError as error:
                raise ArtifactError(str(error).replace(str(folder), place)) from None

    return Stage(
        name=spec.name,
        title=f"{spec.title}: taken over from {redact_text(config.rows_from)}",
        settings={"rows_from": config.rows_from, **(settings or {})},
        parents=parents,
        run=copy,
    )


def read_source_manifest(url: str, stage: str) -> Manifest:
    """Reads the manifest of a finished stage of the run at `url`. Raises `ConfigError` if it does not exist."""
    place = f"{url}/{stage}/artifact"
    content = ColdStore(url).read_whole(f"{stage}/artifact/{MANIFEST}")
    if content is None:
        raise ConfigError(
            f"rows_from: the stage {stage} of {url} is not finished ({place}/{MANIFEST} is missing); give the folder "
            "of a run, or its address, in which that stage is finished"
        )
    return parse_manifest(content, place, kind=stage)


def check_packing(
    config: RunConfig, own: Mapping[str, Any], defaults: Mapping[str, Any], section: str, context: StageContext
) -> None:  # fmt: skip
    """Raises `ConfigError` if the other run packed its rows with other settings. own: settings of this run, by name;
    defaults: values for settings that an older run does not name; section: their key in a run's configuration.
    """
    content = ColdStore(config.rows_from).read_whole("config.yaml")
    if content is None:
        raise ConfigError(
            f"rows_from: {config.rows_from} does not contain a config.yaml; give the folder of a run, or its address"
        )
    path = context.folder.path / "source.yaml"
    write_atomic(path, content)
    theirs = load_yaml(path).get(section)
    if not isinstance(theirs, Mapping):
        raise ConfigError(f"rows_from: {config.rows_from}/config.yaml lacks the section {section}; copy it there again")
    for name, value in own.items():
        if (other := theirs.get(name, defaults[name])) != value:
            raise ConfigError(
                f"{section}.{name}: is {value}, but the rows of {config.rows_from} were packed with {other}; "
                f"set it to {other}"
            )


def check_tokenizer(config: RunConfig, own: Path, stage: str, context: StageContext) -> None:
    """Raises `ConfigError` if the rows were packed with another tokenizer than the one in `own`. stage: stage of the
    other run whose artifact contains its tokenizer.
    """
    store, folder = ColdStore(config.rows_from), context.folder.path / "source-tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    for name in read_source_manifest(config.rows_from, stage).files:
        if name.endswith((".json", ".jinja")) and "/" not in name:
            store.copy(f"{stage}/artifact/{name}", folder / name)
    if difference := tokenizer_difference(Tokenizer.load(own), Tokenizer.load(folder)):
        raise ConfigError(
            f"rows_from: the rows of {config.rows_from} are of another tokenizer than this run's ({difference}); start "
            "both runs from the same model folder with init_from, or both without"
        )


def row_tokens(config: RunConfig, rows: RowSet, seq_len: int, stage: str) -> float:
    """Returns the tokens of an epoch of training before the rows exist here: from the index of the other run, or
    estimated from the size of the sources. stage: name of the stage that packs.
    """
    if not config.rows_from:
        return text_bytes(config.data, rows) / BYTES_PER_TOKEN
    name = f"{stage}/artifact/{rows.name}/train/{INDEX}"
    content = ColdStore(config.rows_from).read_whole(name)
    try:
        index = json.loads(content) if content else {"num_rows": 0}
        return index["num_rows"] // index.get("group_size", 1) * rows.trained_rows * float(seq_len)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{config.rows_from}/{name}: is damaged ({error}); copy it there again") from None
