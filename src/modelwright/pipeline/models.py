"""Selects a model of a run, or the one in a folder; `exports` writes it for other programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.compress.int8 import is_int8_folder
from modelwright.core.artifacts import (
    MANIFEST,
    ArtifactError,
    RunDir,
    is_finished,
    read_attempts,
    read_manifest,
    verify_if_artifact,
)
from modelwright.core.config import ConfigError
from modelwright.core.hub import name_of
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.quantize import QUANTIZE
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.load import ModelSource


@dataclass(frozen=True)
class FoundModel:
    """A verified model, the server settings of its run, and a remark for the user. `remark`: reason why this is not the
    final model of the run; "" if it is. `run`: None for a model folder.
    """

    source: ModelSource
    server: ServeConfig = field(default_factory=ServeConfig)
    requests: RequestsConfig = field(default_factory=RequestsConfig)
    remark: str = ""
    run: RunDir | None = None


def find_model(path: Path, *, stage: str = "", int8: bool = False) -> FoundModel:
    """Returns the model in a model folder, or one of a run directory: that of `stage`, else of the last trained stage
    that has finished; with `int8` the quantized one. Every file is checked against its SHA-256.

    If the artifact of a finished stage is damaged or missing, that is an `ArtifactError`: the model before it is a
    different model, and is used only if `stage` asks for it. Raises `ConfigError` for a stage that produces no model.
    """
    if not (path / "run.json").is_file():
        if stage:
            raise ConfigError(f"--stage: {path} is a model folder, not a run with stages; leave it out or name a run")
        if int8 and not is_int8_folder(path):
            raise ConfigError(
                f"--int8: {path} is a model folder whose weights are not quantized; leave the option out, or name a "
                f"run with the stage {QUANTIZE.name} or the folder that the stage has written"
            )
        name, manifest = name_of(path.resolve()).rpartition("/")[2], verify_if_artifact(path)
        if manifest is None:
            return FoundModel(ModelSource(name=name, folder=path))
        return FoundModel(ModelSource(name=name, folder=path, stage=manifest.kind, digest=manifest.content_digest))
    run = RunDir(path)
    config = read_run_config(run.config)
    if stage and int8:
        raise ConfigError(
            f"--stage: --int8 selects the model of the stage {QUANTIZE.name}; give only one of the two options"
        )
    if stage and stage not in config.served_names:
        raise ConfigError(f"--stage: {stage!r} does not make a model; choose from {', '.join(config.served_names)}")
    trained = (QUANTIZE.name,) if int8 else config.served_names
    # The last of the wanted stages that has an artifact; `unfinished` are the later ones.
    wanted, unfinished = (stage,) if stage else trained, list[str]()
    for name in reversed(wanted):
        artifact = run.stage(name).artifact
        if is_finished(artifact):
            break
        # Whether its last attempt finished is known from its own journal, or from the run's if its folder is gone.
        attempts = read_attempts(run.stage(name))
        if attempts[-1]["state"] == "done" if attempts else name in run.read_info().get("stages", {}):
            text = f"{artifact}: is missing or has no {MANIFEST}, although {name} was finished; run its stage again"
            raise ArtifactError(text + _ways_out(run, name, trained))
        unfinished.insert(0, name)
    else:
        needed = " or ".join(wanted) or "training"
        raise ArtifactError(
            f"{run.path}: has no finished model yet ({needed}); continue with: modelwright run {run.path}"
        )
    try:
        manifest = read_manifest(run.stage(name).artifact, kind=name, verify=True)
    except ArtifactError as error:
        raise ArtifactError(f"{error}{_ways_out(run, name, trained)}") from None
    source = ModelSource(name=config.name, folder=run.stage(name).artifact, stage=name, digest=manifest.content_digest)
    remark = f"{' and '.join(unfinished)} has not finished yet, so this is the model of {name}" if unfinished else ""
    return FoundModel(source, config.serve, config.requests, remark, run)


def _ways_out(run: RunDir, name: str, trained: Sequence[str]) -> str:
    earlier = [stage for stage in trained[: trained.index(name)] if is_finished(run.stage(stage).artifact)]
    ask = f", or ask for an earlier model: --stage {earlier[-1]}" if earlier else ""
    return f" (modelwright run {run.path}){ask}"
