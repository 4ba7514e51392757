"""Reads a run's configuration from its plain form: which stages it has, the sections of these, and whether they agree.

A stage's section is a top-level key of its name. The section of a stage that the run does not have is checked and left
out. A training stage inherits from the sections `training`, `lora`, `ewc` and `energy`. Two configurations are the
same run if their sources and the model that is trained are the same.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

from modelwright.core.artifacts import is_finished
from modelwright.core.config import dump, load_yaml, merge, parse
from modelwright.core.config_docs import field_docs
from modelwright.core.errors import ConfigError
from modelwright.core.redact import redact_text
from modelwright.core.rundir import RunDir
from modelwright.model.hf import load_config
from modelwright.pipeline.config import INHERITED, RunConfig
from modelwright.pipeline.stage import StageSpec
from modelwright.pipeline.stages.model_folder import initial_folder
from modelwright.pipeline.stages.pack import PACK, check_context
from modelwright.pipeline.stages.specs import STAGES, known_stages, stage_names
from modelwright.pipeline.stages.tokenize import TOKENIZE


@functools.cache
def run_schema() -> type:
    """A dataclass with one field per top-level key of a run's YAML: what all runs share, and every stage's section."""
    hints, docs = get_type_hints(RunConfig), field_docs(RunConfig)
    names: Any = Literal[stage_names()]
    common: list[tuple[str, Any, Any]] = []
    for one in fields(RunConfig):
        if one.name == "stages":
            default = tuple(stage.name for stage in STAGES if not (stage.is_implied or stage.only_if_named))
            common.append(("stages", tuple[names, ...], field(default=default, metadata={"doc": docs["stages"]})))
        elif one.name not in ("sections", "further_sections"):
            common.append((one.name, hints[one.name], _documented(one, docs.get(one.name, ""))))
    own = [(stage.name, stage.config, field(default_factory=stage.config)) for stage in known_stages() if stage.config]
    return make_dataclass("Run", [*common, *own], frozen=True, kw_only=True)


def training_names() -> tuple[str, ...]:
    """The stages that train, in order: their sections inherit from `training`."""
    return tuple(stage.name for stage in known_stages() if stage.objective)


def parse_run(data: Mapping[str, Any]) -> RunConfig:
    """The configuration with this plain form. Raises `ConfigError` that starts with the path of the field to change."""
    schema = run_schema()
    data = _with_model(data)
    stages = stages_of(data)
    names = {part.name for stage in stages for part in (stage, *stage.reads) if part.config}
    sections = {stage.name: stage.config for stage in known_stages() if stage.config}
    for name, config in sections.items():
        if name in data and name not in names:
            parse(config, data[name], name)
    kept = {key: value for key, value in data.items() if key not in sections or key in names}
    settings = parse(schema, _inherited(kept, stages))
    shared = {one.name: getattr(settings, one.name) for one in fields(RunConfig) if hasattr(settings, one.name)}
    own = {name: getattr(settings, name) for name in sections if name in names}
    config = RunConfig(**{**shared, "stages": stages, "sections": own})
    _check_lengths(config)
    return config


def _with_model(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """With a section `model`: that of the folder for a run that starts from one."""
    if "model" in data:
        return data
    start = data.get("init_from")
    if not start or not isinstance(start, str):
        return data
    return {**data, "model": dump(load_config(initial_folder(start)))}


def read_run_config(path: Path) -> RunConfig:
    """The configuration in a run's YAML file, with its sections of stages that the run does not have. Raises
    `ConfigError` that names the file.
    """
    data = load_yaml(path)
    try:
        config = parse_run(data)
        return replace(config, further_sections={name: data[name] for name in left_out(data, config)})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def left_out(data: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The sections in `data` that belong to stages which the run does not have."""
    known = [stage.name for stage in known_stages() if stage.config]
    return [name for name in known if name in data and name not in config.sections]


def _documented(one: Field[Any], doc: str) -> Any:
    metadata = {**one.metadata, **({"doc": doc} if doc else {})}
    if one.default is not MISSING:
        return field(default=one.default, metadata=metadata)
    if one.default_factory is not MISSING:
        return field(default_factory=one.default_factory, metadata=metadata)
    return field(metadata=metadata)


def stages_of(data: Mapping[str, Any]) -> tuple[StageSpec, ...]:
    """The stages of a run, those included that `init_from` implies and without those that it replaces."""
    given = {key: data[key] for key in ("stages", "init_from") if key in data}
    selection = cast(Any, parse(_selection(), given))
    names: tuple[str, ...] = selection.stages
    ordered = [stage.name for stage in known_stages() if stage.name in names]
    if not names:
        raise ConfigError(f"stages: is empty; choose from {', '.join(stage_names())}")
    if len(set(names)) != len(names):
        raise ConfigError(f"stages: one is named twice: {', '.join(names)}")
    if list(names) != ordered:
        raise ConfigError(f"stages: must be in the pipeline's order: {', '.join(ordered)}")
    wrong = "never" if selection.init_from else "only"
    return tuple(
        stage for stage in known_stages() if (stage.name in names or stage.is_implied) and stage.with_init_from != wrong
    )


@functools.cache
def _selection() -> type:
    """What decides which stages a run has, as a part of `run_schema`."""
    schema = run_schema()
    hints = get_type_hints(schema)
    parts = {one.name: one for one in fields(schema)}
    chosen = [(name, hints[name], field(default=parts[name].default)) for name in ("stages", "init_from")]
    return make_dataclass("Selection", chosen, frozen=True, kw_only=True)


def _inherited(data: Mapping[str, Any], stages: Sequence[StageSpec]) -> Mapping[str, Any]:
    """Give each training stage the shared settings that it does not set itself."""
    shared, others = data.get("training", {}), {name: data[name] for name in INHERITED if data.get(name)}
    if not all(isinstance(section, Mapping) for section in (shared, *others.values())):
        return data  # which parsing refuses
    shared = {**shared, **others}
    own = {stage.name: data.get(stage.name, {}) for stage in stages if stage.objective}
    return {**data, **{name: merge(shared, one) for name, one in own.items() if isinstance(one, Mapping)}}


def check_stages(config: RunConfig) -> None:
    """Raise `ConfigError` if a stage lacks one that it needs."""
    present = {stage.name for stage in config.stages}
    known = {stage.name: stage for stage in known_stages()}
    for stage in config.stages:
        for name in stage.needs(config):
            if name not in present:
                needed = known[name]
                replaced = needed.model_title or needed.with_init_from == "never"
                way_out = " or start from a model folder with init_from" if replaced else ""
                raise ConfigError(f"stages: {stage.name} needs {name}; add it{way_out}")


def _check_lengths(config: RunConfig) -> None:
    """Check that the sections of the run's stages agree; other stages do not matter."""
    check_stages(config)
    if not config.init_from:
        check_context(config)
    if config.has(TOKENIZE) and config.tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} has no room for the tokenizer's "
            f"{config.tokenizer.vocab_size} (tokenizer.vocab_size); make it at least as large"
        )
    for stage in config.trainings:
        try:
            config.section(stage).batch_rows(config.section(PACK).seq_len * stage.trained_rows)
        except ConfigError as error:
            raise ConfigError(f"{stage.name}.{error}") from None


SHOWN = 3
"""Differences that an error lists."""


def is_same_run(config: RunConfig, previous: RunConfig) -> bool:
    """Whether both, with their paths and models resolved, describe one run."""
    return not _differences(config, previous)


def check_same_run(config: RunConfig, previous: RunConfig | None, run: RunDir) -> None:
    """Raise `ConfigError` if `run` has results of another run, which this one would replace.

    config: with paths and model resolved
    previous: the configuration that the folder was last used with, None for a new folder
    """
    changes = _differences(config, previous) if previous else []
    if not changes or not has_results(run):
        return
    more = [f"{len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    raise ConfigError(
        f"{run.path}: contains another run ({'; '.join([*changes[:SHOWN], *more])}); choose another --run-dir, or "
        "replace that run with --restart"
    )


def has_results(run: RunDir) -> bool:
    """Whether a stage has finished or a training has checkpoints."""
    stages = [run.stage(path.parent.name) for path in run.path.glob("*/stage.json")]
    return any(is_finished(stage.artifact) or any(stage.checkpoints.glob("*")) for stage in stages)


def _differences(config: RunConfig, previous: RunConfig) -> list[str]:
    """Each differing setting, as `model.num_layers: was 6, now 2`."""
    before, now = _identity(previous), _identity(config)
    keys = dict.fromkeys([*before, *now])
    return [f"{key}: was {_text(before[key])}, now {_text(now[key])}" for key in keys if before[key] != now[key]]


def _identity(config: RunConfig) -> dict[str, Any]:
    model = {f"model.{name}": value for name, value in dump(config.model).items()}
    data = {"rows_from": config.rows_from} if config.rows_from else {"data.sources": dump(config.data)["sources"]}
    return {"rows_from": "", "data.sources": [], **data, "init_from": config.init_from, **model}


def _text(value: Any) -> str:
    words = value if isinstance(value, list) else [value]
    return redact_text(" ".join(map(str, words))) or "''"
