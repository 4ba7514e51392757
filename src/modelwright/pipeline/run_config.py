"""Reads a run's configuration from its plain form: its stages, their sections, and the checks that they agree.

A stage's section is a top-level key of its name. The section of a stage that the run does not have is checked and left
out. A training stage inherits from the sections `training`, `lora`, `ewc` and `energy`, and from `rollout` or
`vision_tower` if it generates completions or reads images. What depends on the machine and on the run's folder is
decided in `pipeline.resolve`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

from modelwright.core.artifacts import ArtifactError, RunDir
from modelwright.core.config import ConfigError, dump, load_yaml, merge, parse
from modelwright.core.config_docs import field_docs
from modelwright.model.hf import load_config
from modelwright.pipeline.stage import SHARED, RunConfig, StageSpec, inherited
from modelwright.pipeline.stages.init import initial_folder
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.specs import STAGES, known_stages, stage_names
from modelwright.pipeline.stages.tokenize import TOKENIZE
from modelwright.train.config import LENGTHS


@functools.cache
def run_schema() -> type:
    """Returns a dataclass with a field for each top-level key of a run's YAML: the settings that all runs share, and
    every stage's section.
    """
    hints, docs = get_type_hints(RunConfig), field_docs(RunConfig)
    names: Any = Literal[stage_names()]
    new_field: Any = field  # its overloads know no default that may be MISSING
    common: list[tuple[str, Any, Any]] = []
    for one in fields(RunConfig):
        if one.name == "stages":
            default = tuple(stage.name for stage in STAGES if not (stage.is_implied or stage.only_if_named))
            common.append(("stages", tuple[names, ...], field(default=default, metadata={"doc": docs["stages"]})))
        elif one.name not in ("sections", "further_sections"):
            metadata = {**one.metadata, **({"doc": docs[one.name]} if docs.get(one.name) else {})}
            shared = new_field(default=one.default, default_factory=one.default_factory, metadata=metadata)
            common.append((one.name, hints[one.name], shared))
    own = [(name, config, field(default_factory=config)) for name, config in section_types().items()]
    return make_dataclass("Run", [*common, *own], frozen=True, kw_only=True)


def section_types() -> dict[str, type]:
    """Returns the class of each section that only some runs have, by its name: those that stages share come first."""
    return {**SHARED, **{stage.name: stage.config for stage in known_stages() if stage.config}}


def training_names() -> tuple[str, ...]:
    """Returns the stages that train, in order: their sections inherit from `training`."""
    return tuple(stage.name for stage in known_stages() if stage.objective)


def parse_run(data: Mapping[str, Any]) -> RunConfig:
    """Parses the plain form of a configuration. Raises `ConfigError` that starts with the path of the field to change.

    A run with `init_from` needs no section `model`: it is that of the folder.
    """
    return parse_layers(data)[0]


def parse_layers(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> tuple[RunConfig, Mapping[str, Any]]:
    """Parses a plain configuration with others laid over it, as `lay_over` and `parse_run` do; returns it with the
    plain form of all together.
    """
    data = lay_over(base, *layers)
    inherits = {stage.name: inherited(stage) for stage in known_stages() if stage.objective}
    stages, start = stages_of(data), data.get("init_from")
    if "model" not in data and start and isinstance(start, str):
        data = {"model": dump(load_config(initial_folder(start))), **data}
    names = {part.name for stage in stages for part in (stage, *stage.reads) if part.config}
    trainings = [stage for stage in stages if stage.objective]
    names |= {name for stage in trainings for name in inherits[stage.name] if name in SHARED}
    sections = section_types()
    for name, config in sections.items():
        # Sections of stages that are left out are checked, too: an error would appear only once the stage is added.
        if name in data and name not in names:
            parse(config, data[name], name)
    kept = {key: value for key, value in data.items() if key not in sections or key in names}
    # Each training stage inherits the shared settings that it does not set itself; parsing refuses malformed sections.
    for stage in trainings:
        shared, own = kept.get("training", {}), kept.get(stage.name, {})
        others = {name: kept[name] for name in inherits[stage.name] if kept.get(name)}
        if all(isinstance(section, Mapping) for section in (shared, own, *others.values())):
            kept[stage.name] = merge({**shared, **others}, own)
    settings = parse(run_schema(), kept)
    common = {one.name: getattr(settings, one.name) for one in fields(RunConfig) if hasattr(settings, one.name)}
    own = {name: getattr(settings, name) for name in sections if name in names}
    config = RunConfig(**{**common, "stages": stages, "sections": own})
    # The run must have the stages that its stages need, and their sections must agree.
    present = {stage.name for stage in config.stages}
    known = {stage.name: stage for stage in known_stages()}
    for stage in config.stages:
        for name in stage.needs(config):
            if name not in present:
                needed = known[name]
                replaced = needed.model_title or needed.with_init_from == "never"
                way_out = " or start from a model folder with init_from" if replaced else ""
                raise ConfigError(f"stages: {stage.name} needs {name}; add it{way_out}")
    # With `init_from` the context is that of the folder, which `resolve_inputs` checks.
    if not config.init_from and config.has(PACK) and config.section(PACK).seq_len > config.model.max_seq_len:
        raise ConfigError(
            f"pack.seq_len: {config.section(PACK).seq_len} is more than the model's context (model.max_seq_len "
            f"{config.model.max_seq_len}); make one equal to the other"
        )
    if config.has(TOKENIZE) and config.tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} is less than the tokenizer's "
            f"{config.tokenizer.vocab_size} (tokenizer.vocab_size); make it at least as large"
        )
    for stage in config.trainings:
        try:
            config.section(stage).batch_rows(config.section(PACK).seq_len * stage.trained_rows)
        except ConfigError as error:
            raise ConfigError(f"{stage.name}.{error}") from None
    return config, data


def read_run_config(path: Path) -> RunConfig:
    """Reads the configuration in a run's YAML file, with its sections of stages that the run does not have. Raises
    `ConfigError` that names the file.
    """
    data = load_yaml(path)
    try:
        config = parse_run(data)
        return replace(config, further_sections={name: data[name] for name in left_out(data, config)})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def previous_config(run: RunDir) -> RunConfig | None:
    """Returns the configuration that the run last used, `None` for a new run."""
    if not run.config.exists():
        return None
    try:
        return read_run_config(run.config)
    except ConfigError as error:
        raise ArtifactError(f"{error}; mend or remove it, or choose another --run-dir") from None


def left_out(data: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Returns the sections in `data` that belong to stages which the run does not have."""
    return [name for name in section_types() if name in data and name not in config.sections]


def stages_of(data: Mapping[str, Any]) -> tuple[StageSpec, ...]:
    """Returns the stages of a run, including those that `init_from` implies and without those that it replaces."""
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


def select_stages(only: Sequence[str], previous: Sequence[str]) -> list[str]:
    """Returns the stages of a run when `--stages` names `only`, in the pipeline's order: these, and those that the run
    in the same folder (`previous`) already has. The same command therefore means the same when it is repeated.
    """
    for name in only:
        if name not in stage_names():
            raise ConfigError(f"stages: {name!r} is not one of {', '.join(stage_names())}")
    return [name for name in stage_names() if name in only or name in previous]


def lay_over(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merges plain configurations; a training length in one of them replaces one that those before it give in another
    unit, or as the time of the whole run.
    """
    merged = dict(base)
    for over in layers:
        if lengths := [name for name in training_names() if has_length(over.get(name))]:
            # A length clears the time budget only if its stage is part of the run.
            if not {stage.name for stage in stages_of({**merged, **over})}.isdisjoint(lengths):
                merged.pop("minutes", None)
            for name in lengths:
                if isinstance(before := merged.get(name), Mapping):
                    merged[name] = {key: value for key, value in before.items() if key not in LENGTHS}
        merged = merge(merged, over)
    return merged


def has_length(section: Any) -> bool:
    """True if the plain section of a training stage sets the length of the training."""
    return isinstance(section, Mapping) and any(section.get(name) for name in LENGTHS)


@functools.cache
def _selection() -> type:
    """Returns the part of `run_schema` that decides the stages of a run."""
    schema = run_schema()
    hints = get_type_hints(schema)
    parts = {one.name: one for one in fields(schema)}
    chosen = [(name, hints[name], field(default=parts[name].default)) for name in ("stages", "init_from")]
    return make_dataclass("Selection", chosen, frozen=True, kw_only=True)
