"""From a text to the commands that help: those that it names, those of the options and settings that it names, else
what usually helps with errors of its class or package. Each command exists in the parsers of `main.COMMANDS`.
"""

import argparse
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import get_type_hints

from modelwright.cli.error_texts import INSERTED, KnownError
from modelwright.core.errors import ModelwrightError

_COMMAND = re.compile(r"modelwright ([a-z][\w-]*(?: [a-z][\w-]*)*)((?: [A-Z]+\b)*)")
_PIP = re.compile(r"pip install (?:'[^']+'|-e [\w./]*[\w/]|-e \.|[\w-]+\[[\w,-]+\])")
_MODULE = re.compile(r"python -m modelwright(?:\.\w+)+(?: [A-Z]+)?")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*(?:\.[\w-]+)*")
_WORD = re.compile(r"[a-z]\w*_\w+(?:\.\w+)*|[a-z]\w*(?:\.\w+)+")
_STAGE = re.compile(r"\brun the (?:stage )?(\w+)(?: stage)?(?: again)?\b")
_AGAIN = re.compile(r"\b(?:run|pack|quantize|write|copy)\w* .*\bagain\b")
GO_ON = "modelwright run RUN"
"""Goes on with a run: makes what is missing or damaged, resumes what was cut off."""
SHOW_SETTINGS = "modelwright config RUN"
"""All settings of a run, with their documentation."""

USUAL_OF_PACKAGE: Mapping[str, str] = {
    "compress/gguf": "export",
    "compress/onnx": "export",
    "continual": "continual run",
    "continual/benchmark": "continual freeze",
    "continual/demo": "continual demo",
    "continual/drift": "drift check",
    "continual/gate": "continual gate",
    "continual/lineage": "lineage",
    "data/augment": "augment",
    "evaluate": "evaluate",
    "infer": "serve",
    "plan": "plan",
    "plan/advice": "doctor",
    "plan/carbon": "plan energy",
    "plan/cost": "plan cost",
    "plan/probes": "doctor",
    "plan/rules": "doctor",
    "plan/spot": "plan spot",
    "serve": "serve",
    "serve/manifests": "manifests",
    "serve/request_log": "requests export",
}
"""The command whose options lead to errors of a package. The packages that are left out work for a run."""
_FOR_RUNS = ("config", "plan", "run")
"""Files of the pipeline that have the name of a command, and work for all that handle runs."""
USUAL_OF_CLASS: Mapping[str, str] = {
    "ConfigError": SHOW_SETTINGS,
    "StorageError": "modelwright doctor",  # the free space and speed of the disk
    "ModelError": "modelwright explain init_from",  # which folders can be loaded
    "DataError": "modelwright explain data.sources",  # which files can be read
}
"""What helps with errors of a class in packages that work for a run; with all others, to go on with it."""


def commands_of(error: KnownError) -> list[str]:
    """At least one."""
    named = named_commands(error.text)
    if named:
        return named
    found = [*option_commands(error.text, _home(error)), *_settings_of(error)]
    return list(dict.fromkeys(found)) or [_usual(error)]


def advised_commands(advice: str, otherwise: str) -> list[str]:
    """Commands and settings that an advice names; `otherwise` if there are none."""
    return list(dict.fromkeys([*named_commands(advice), *explained(advice)])) or [otherwise]


def named_commands(text: str) -> list[str]:
    """The commands that a text itself names, as far as they exist."""
    found = {match.start(): match[0] for kind in (_PIP, _MODULE) for match in kind.finditer(text)}
    for match in _COMMAND.finditer(text):
        if path := existing_path(match[1].split()):
            arguments = match[2] if path == match[1] else ""
            found[match.start()] = f"modelwright {path}{arguments}"
    return list(dict.fromkeys(found[place] for place in sorted(found) if INSERTED not in found[place]))


def option_commands(text: str, home: str = "") -> list[str]:
    """For options that a text names: the setting, or the help of the command that has most of them. home: the command
    to prefer among equals.
    """
    options = list(dict.fromkeys(_OPTION.findall(text)))
    settings = [option[2:] for option in options if option[2:] in _settings()]
    rest = {option for option in options if option[2:] not in _settings()}
    counts = {path: len(rest & known) for path, known in command_options().items()}
    most = max(counts.values())
    paths = [path for path, count in counts.items() if most and count == most]
    chosen = next((path for path in paths if path == home), next((path for path in paths if path.startswith(home)), ""))
    commands = [_explain(setting) for setting in settings]
    return [f"modelwright {chosen or paths[0]} --help", *commands] if paths else commands


def explained(text: str) -> list[str]:
    """`modelwright explain KEY` for each setting that a text names by its last parts."""
    commands: list[str] = []
    for word in dict.fromkeys(_WORD.findall(text)):
        ending = [key for key in _settings() if key == word or key.endswith(f".{word}")]
        commands += [_explain(ending[0])] if ending else []
    return commands


@functools.cache
def command_options() -> dict[str, frozenset[str]]:
    """The options of every command, subcommands by both words."""
    from modelwright.cli.main import COMMANDS

    paths: dict[str, frozenset[str]] = {}
    for name, command in COMMANDS.items():
        try:
            paths |= dict(_walk(name, command.parser()))
        except ModelwrightError:  # its package is not installed
            paths[name] = frozenset()
    return paths


def existing_path(words: Sequence[str]) -> str:
    """The longest beginning of the words that is a command, "" if none is."""
    return next((path for n in (2, 1) if (path := " ".join(words[:n])) in command_options()), "")


def _walk(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, frozenset[str]]]:
    actions = parser._actions  # pyright: ignore[reportPrivateUsage]
    yield path, frozenset(name for action in actions for name in action.option_strings)
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for name, below in action.choices.items():
                yield from _walk(f"{path} {name}", below)


def _home(error: KnownError) -> str:
    """The command that an error belongs to, "" for what works for a run."""
    folder, _, stem = error.module.rpartition("/")
    names = [f"{folder} {stem}"]
    if folder == "cli":
        names += [
            f"{stem} {error.function.lstrip('_')}",
            error.function,
            stem.replace("_", " "),
            stem.replace("_", "-"),
        ]
    if folder == "pipeline" and stem not in _FOR_RUNS:
        names += [stem.replace("_", "-")]
    if path := next((name for name in names if name in command_options()), ""):
        return path
    parts = error.module.split("/")
    beginnings = ("/".join(parts[:number]) for number in range(len(parts), 0, -1))
    return next((USUAL_OF_PACKAGE[one] for one in beginnings if one in USUAL_OF_PACKAGE), "")


def _settings_of(error: KnownError) -> list[str]:
    """`modelwright explain KEY` for the settings that an error is about."""
    head, home = error.symptom.partition(":")[0], _home(error)
    fields = [word.strip() for word in head.split(",")]
    keys = [] if home else list(fields)
    if prefix := _prefixes().get(f"{error.module}.{error.owner}"):
        keys += [f"{prefix}.{word}" for word in fields]
    if head.startswith(f"{INSERTED}."):
        keys += [key for key in _settings() if key.endswith(head[1:])][:1]
    commands = [_explain(key) for key in keys if key in _settings()]
    if commands or home:
        return commands
    return [_explain(key) for word in fields if (key := _only_setting(word))] or explained(error.text)


def _only_setting(word: str) -> str:
    """The setting that a word alone names: its last part, in one section of a run; "" if several have it."""
    from modelwright.pipeline.run_config import training_names

    keys = [key for key in _settings() if key.endswith(f".{word}")]
    places = {re.sub(rf"^(?:training|{'|'.join(training_names())})\.", "", key) for key in keys}
    return keys[0] if len(places) == 1 else ""


def _usual(error: KnownError) -> str:
    """What helps with errors of this package or class."""
    if home := _home(error):
        return f"modelwright {home} --help"
    if (stage := _STAGE.search(error.remedy)) and stage[1] in _stages():
        return f"{GO_ON} --stages {stage[1]}"
    if _AGAIN.search(error.remedy):
        return GO_ON
    return USUAL_OF_CLASS.get(error.kind, GO_ON)


def _explain(key: str) -> str:
    """The command for a setting; what a training stage inherits is explained where all stages share it."""
    rest = key.partition(".")[2]
    return f"modelwright explain {next(one for one in (key, f'training.{rest}', rest) if one in _explained())}"


@functools.cache
def _explained() -> frozenset[str]:
    from modelwright.cli.config import run_settings

    return frozenset(setting.key for setting in run_settings())


@functools.cache
def _settings() -> dict[str, None]:
    """In their order."""
    from modelwright.cli.config import setting_names

    return dict.fromkeys(setting_names())


@functools.cache
def _stages() -> tuple[str, ...]:
    from modelwright.pipeline.stages.specs import stage_names

    return stage_names()


@functools.cache
def _prefixes() -> dict[str, str]:
    """Where the fields of a config class stand in a run's settings, by its file and name: first where all runs share
    them.
    """
    from modelwright.core.config_docs import setting_fields
    from modelwright.pipeline.run_config import run_schema

    found: dict[str, str] = {}

    def walk(cls: type, path: str) -> None:
        hints = get_type_hints(cls)
        for field in setting_fields(cls):
            hint = hints.get(field.name, field.type)
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                place = f"{hint.__module__.partition('.')[2].replace('.', '/')}.{hint.__name__}"
                key = f"{path}.{field.name}" if path else field.name
                found.setdefault(place, key)
                walk(hint, key)

    walk(run_schema(), "")
    return found
