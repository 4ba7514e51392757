"""Settings of cleaning, the list of its steps, and steps in a user's own Python file, named `FILE.py:NAME`.

NAME is a class that is made without arguments, or a function that takes a document. The file is read in every worker
process, so only its name and digest travel between processes. An error in one document drops that document, with the
name of the error; an error that affects every document ends the work.
"""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from modelwright.core.config import ConfigError, DataError, ModelwrightError, did_you_mean, dump, require
from modelwright.core.extensions import configured
from modelwright.data.clean.fingerprints import DuplicatesConfig
from modelwright.data.clean.steps.decontamination import DECONTAMINATION, DecontaminationConfig
from modelwright.data.clean.steps.duplicates import DUPLICATES
from modelwright.data.clean.steps.format import FORMAT, FormatConfig
from modelwright.data.clean.steps.images import IMAGES
from modelwright.data.clean.steps.noise import NOISE, NoiseConfig
from modelwright.data.clean.steps.privacy import PRIVACY, PrivacyConfig
from modelwright.data.clean.steps.quality import QUALITY, QualityConfig
from modelwright.data.clean.steps.step import Columns, CorpusStep, Decisions, Drop, MeasuredCorpus, Step, StepSpec
from modelwright.data.clean.steps.urls import URLS, UrlsConfig
from modelwright.data.document import Document

STEPS: tuple[StepSpec, ...] = (FORMAT, URLS, DECONTAMINATION, QUALITY, NOISE, DUPLICATES, IMAGES, PRIVACY)
"""The steps in their order. A user's own steps (`CleanConfig.steps`) follow the first."""
STEPS_GROUP = "modelwright.steps"
"""Entry points of other packages: each a `StepSpec`."""
FAILED = "the step failed"
"""Reason of a drop by a step that raised an exception."""


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """The settings of the steps, in their order."""

    format: FormatConfig = field(default_factory=FormatConfig)
    steps: tuple[str | dict[str, Any], ...] = field(default=(), hash=False)
    """Further steps, each `FILE.py:NAME` of your own, or `NAME` or `{NAME: {SETTINGS}}` of another installed package
    (docs/extending.md). They run in this order, after `format`."""
    urls: UrlsConfig = field(default_factory=UrlsConfig)
    decontamination: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    engine: Literal["local", "ray"] = "local"
    """Engine that processes shards: `local` uses processes of this machine, `ray` uses Ray, on this machine or on the
    cluster at `RAY_ADDRESS`. The result does not depend on it."""
    num_workers: int = 0
    """Number of processes that clean; 0 uses every core. The result does not depend on it."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"num_workers: must not be negative, got {self.num_workers}; 0 uses every core")
        steps = list[str | dict[str, Any]]()
        for entry in self.steps:
            one = {entry: {}} if isinstance(entry, str) and re.fullmatch(r"[\w-]+", entry) else entry
            if isinstance(one, dict):
                if len(one) != 1:
                    text = f"steps: {one} has {len(one)} names"
                    raise ConfigError(f"{text}; write an entry {{NAME: {{SETTINGS}}}} for each")
                # With all settings written out, cleaned data does not change with the defaults of another package.
                one = {name: dump(settings) for name, (_, settings) in _named(one).items()}
            steps.append(one)
        object.__setattr__(self, "steps", tuple(steps))

    def extras(self) -> dict[str, str]:
        """The extras that these settings need, by setting."""
        own = [(spec, spec.settings_of(self)) for spec in STEPS]
        names = [f"{spec.section or spec.name}.{name}" for spec, values in own for name in spec.needs_clean(values)]
        return {f"clean.{name}": "clean" for name in names}

    def specs(self) -> list[tuple[StepSpec, Any]]:
        """All steps except those of files, each with its settings: this package's, then those of other packages."""
        named = [one for entry in self.steps if isinstance(entry, dict) for one in _named(entry).values()]
        return [*((spec, spec.settings_of(self)) for spec in STEPS), *named]

    def replace_paths(self, source: Callable[[str], str], path: Callable[[str], str]) -> "CleanConfig":
        """Returns the settings with one function applied to each source that a step reads, and another to each path."""
        own = [spec for spec in STEPS if not spec.section]
        sections = {spec.name: spec.replace_paths(spec.settings_of(self), source, path) for spec in own}
        steps = list[str | dict[str, Any]]()
        for entry in self.steps:
            if isinstance(entry, str):
                steps.append(path(entry))
                continue
            ((name, (spec, settings)),) = _named(entry).items()
            steps.append({name: dump(spec.replace_paths(settings, source, path))})
        return replace(self, **sections, steps=tuple(steps))


def _named(entry: dict[str, Any]) -> dict[str, tuple[StepSpec, Any]]:
    return configured(STEPS_GROUP, StepSpec, entry, "steps")


def build_steps(config: CleanConfig, *, seed: int = 1) -> list[Step | CorpusStep]:
    """Builds the steps of the settings. Raises `ConfigError` for one that cannot be loaded or whose name is taken, and
    for an extra that is not installed.
    """
    require(config.extras())
    own = list[Step | CorpusStep]()
    for entry in config.steps:
        if isinstance(entry, str):
            own.append(load_step(entry))
        else:
            ((name, (spec, settings)),) = _named(entry).items()
            step: Any = spec.build(settings, seed)
            if step is None:
                continue
            # Wrapped, so that errors in documents are treated as those of a file's step.
            is_corpus_step = isinstance(step, CorpusStep)
            if getattr(step, "name", None) != name or not (callable(step) or is_corpus_step):
                raise ConfigError(f"steps.{name}: its package builds {step!r}, which is not a step named {name!r}")
            # Its fields identify what it does: without them interrupted work would go on with another step.
            if not is_dataclass(step):
                raise ConfigError(f"steps.{name}: its package builds a {type(step).__name__}; make it a dataclass")
            place = _Installed(step, getattr(sys.modules.get(type(step).__module__), "__file__", None) or "")
            own.append(FileCorpusStep(place, name) if is_corpus_step else FileStep(place, name))
    known = {spec.name for spec in STEPS}
    for step in own:
        if step.name in known:
            raise ConfigError(f"steps: there are two steps called {step.name!r}; rename one of them")
        known.add(step.name)
    first, *others = (step for spec in STEPS if (step := spec.build(spec.settings_of(config), seed)) is not None)
    return [first, *own, *others]


@dataclass(frozen=True)
class _Place:
    """A step in a file. sha256: digest of the file, so that a changed one is another step."""

    path: str
    attribute: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.path}:{self.attribute}"


@dataclass(frozen=True)
class _Installed:
    """A step of another package. path: of the module that defines it."""

    step: Any
    path: str

    def __str__(self) -> str:
        return f"step {self.step.name} ({self.path})"


@dataclass(frozen=True)
class FileStep:
    """A `Step` of a file or of another package."""

    place: _Place | _Installed
    name: str

    def __call__(self, document: Document) -> Document | Drop:
        try:
            result = _load(self.place)(document)
        except ModelwrightError:
            raise
        except Exception as error:
            # The text of an error may repeat that of the document, and drops are shown before values are masked.
            return Drop(FAILED, f"{type(error).__name__} in {_line_of(error, self.place.path)}")
        if not isinstance(result, (Document, Drop)):
            text = f"{self.place}: returned a {type(result).__name__} for {document.id}"
            raise DataError(f"{text}; a step returns the document, changed or not, or a Drop")
        return result


@dataclass(frozen=True)
class FileCorpusStep:
    """A `CorpusStep` of a file or of another package."""

    place: _Place | _Installed
    name: str

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        return self._call("measure", documents, columns)

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        return self._call("decide", corpus)

    def _call(self, method: str, *arguments: Any) -> Any:
        expected = {"measure": Mapping, "decide": Decisions}[method]
        try:
            result = getattr(_load(self.place), method)(*arguments)
        except ModelwrightError:
            raise
        except Exception as error:
            text = f"{self.place}: {method} raised {type(error).__name__} in {_line_of(error, self.place.path)}"
            raise DataError(f"{text} ({error}); correct the step and run the same command again") from error
        if not isinstance(result, expected):
            raise DataError(f"{self.place}: {method} returned a {type(result).__name__}, not {expected.__name__}")
        return result


def load_step(reference: str) -> Step | CorpusStep:
    """Loads the step `FILE.py:NAME`. Raises `ConfigError` with the fault of the file or the name."""
    path, separator, attribute = reference.rpartition(":")
    if not separator or not path.endswith(".py") or not attribute.isidentifier():
        raise ConfigError(f"steps: {reference!r} is not FILE.py:NAME, such as my_steps.py:NoTables")
    file = Path(path).expanduser()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"steps: {path}: cannot be read ({error.strerror}); name a Python file") from None
    place = _Place(str(file.absolute()), attribute, hashlib.sha256(content).hexdigest())
    loaded = _load(place)
    name = str(getattr(loaded, "name", attribute))
    return FileCorpusStep(place, name) if isinstance(loaded, CorpusStep) else FileStep(place, name)


def _load(place: _Place | _Installed) -> Any:
    return place.step if isinstance(place, _Installed) else _load_file(place)


@cache
def _load_file(place: _Place) -> Any:
    """Loads the step, once in each process."""
    module = _module(place.path, place.sha256)
    value = vars(module).get(place.attribute)
    if value is None:
        own = (name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__)
        names = [name for name in own if not name.startswith("_")]
        text = f"steps: {place.path} has no {place.attribute}{did_you_mean(place.attribute, names)}"
        raise ConfigError(f"{text} (it has {', '.join(names) or 'no class and no function'})")
    try:
        step = cast(Any, value() if isinstance(value, type) else value)
    except Exception as error:
        text = f"steps: {place} cannot be made without arguments ({type(error).__name__}: {error})"
        raise ConfigError(f"{text}; give its fields defaults") from None
    if not callable(step) and not isinstance(step, CorpusStep):
        text = f"steps: {place} is not a step: it is not called with a document, and does not have measure and decide"
        raise ConfigError(f"{text}; docs/data.md has an example of each")
    return step


@cache
def _module(path: str, sha256: str) -> Any:
    content = Path(path).read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{path}: has changed while it was used; run the same command again")
    name = f"modelwright_steps_{sha256[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the name ends in .py"
    # Registered before it is executed: dataclasses look their module up.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(content, path, "exec"), vars(module))
    except Exception as error:
        text = f"steps: {path}: cannot be imported ({type(error).__name__} in {_line_of(error, path)}: {error})"
        raise ConfigError(f"{text}; correct the file") from None
    return module


def _line_of(error: BaseException, path: str) -> str:
    """`my_steps.py:12`: the last line of the file that the error passed through."""
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{Path(path).name}:{line}" if line else Path(path).name
