"""`modelwright evaluate`: lm-eval's own evaluator on local task files, with a model of ours (`evaluate/harness.py`).

Tasks are lm-eval's YAML files, whose data are local files too. A task that names a data set of the hub is refused
before anything is loaded.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.core.artifacts import Manifest, describe_file, write_atomic
from modelwright.core.config import ConfigError
from modelwright.core.progress import Progress
from modelwright.core.resources import git_commit
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.pipeline.models import FoundModel
from modelwright.pipeline.resolve import resolved_device
from modelwright.serve.load import load_folder

FILE_FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Readers of files that `dataset_path` may name, in addition to a local folder; without the one named pandas, which
unpickles."""
IGNORED_FOLDERS = frozenset({"__pycache__", ".ipynb_checkpoints"})
"""Folders that lm-eval does not search."""
OFFLINE = ("HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_HUB_OFFLINE")


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Settings of lm-eval. limit: documents of each task, 0 for all; num_fewshot: -1 uses each task's own number."""

    limit: int = 0
    num_fewshot: int = -1
    uses_chat: bool = False
    bootstrap_iters: int = 100_000

    def __post_init__(self) -> None:
        for name, least in (("limit", 0), ("num_fewshot", -1), ("bootstrap_iters", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class TaskList:
    """Tasks and groups by name, and the lm-eval object that knows their files."""

    names: tuple[str, ...]
    manager: Any


def find_tasks(path: Path) -> TaskList:
    """Returns the tasks of a YAML file, or of all those in a folder. Raises `ConfigError` without the package lm_eval,
    and one that names the file or the task with its problem.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("evaluate: needs the package lm_eval: pip install 'modelwright[eval]'")
    os.environ.update(dict.fromkeys(OFFLINE, "1"))  # before the import, which reads them
    if not path.exists():
        raise ConfigError(f"--tasks: {path} does not exist; give a folder with lm-eval's YAML files, or one of them")
    folder = path if path.is_dir() else path.parent
    files = [file for file in folder.glob("**/*.yaml") if IGNORED_FOLDERS.isdisjoint(file.parts)]
    defining: list[Path] = []
    for file in sorted(files) if path.is_dir() else [path]:
        try:
            top = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: is not valid YAML ({' '.join(str(error).split())})") from None
        # A file without these keys is only a part that others include.
        if isinstance(top, yaml.MappingNode) and any(key.value in ("task", "group") for key, _ in top.value):
            defining.append(file)
    manager = import_module("lm_eval.tasks").TaskManager(include_path=folder, include_defaults=False)
    entries = manager.task_index.items()
    known = {entry.yaml_path.resolve() for _, entry in entries if entry.yaml_path}
    for file in defining:
        if file.resolve() not in known:  # lm-eval skips such files without a message
            raise ConfigError(
                f"{file}: lm-eval cannot read this task; its name must be a text that no other file defines, the files "
                "that it includes must exist, and no tag but !function is known"
            )
    index: dict[str, Any] = {name: entry for name, entry in entries if isinstance(name, str) and entry.cfg}
    chosen = {n: e for n, e in index.items() if path.is_dir() or Path(e.yaml_path).resolve() == path.resolve()}
    if not chosen:
        raise ConfigError(f"--tasks: {path} defines no task; a task's file has the keys task, dataset_path and others")
    for name, entry in index.items():
        if entry.kind.name == "PY_TASK":
            raise ConfigError(f"{entry.yaml_path}: task {name} is a Python class, which may load anything; write YAML")
        _check_data(name, entry.cfg, str(entry.yaml_path))
    named = {one for entry in index.values() for one in _parts(entry.cfg)} if path.is_dir() else set[str]()
    names = tuple(n for n, e in chosen.items() if n not in named and not named & set(e.tags))
    for name in names:
        try:
            manager.load([name])
        except Exception as error:  # of any kind, from what the task names
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{index[name].yaml_path}: lm-eval cannot load task {name} ({reason})") from error
    return TaskList(names=names, manager=manager)


def evaluate_tasks(
    found: FoundModel, tasks: TaskList, config: HarnessConfig, progress: Progress, *, engine: EngineConfig | None = None
) -> dict[str, Any]:
    """Returns lm-eval's results, with the model's digest under `config`. engine: sizes other than the defaults."""
    folder, digest = found.source.folder, found.source.digest
    if not digest:  # over the files of a model folder without a manifest, as a manifest's would be
        files = {path.name: describe_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
        digest = Manifest(kind="", digest="", files=files).content_digest
    model, _ = load_folder(folder, Int8WeightsConfig())
    sizes = engine or EngineConfig(kv_cache_tokens=max(EngineConfig.kv_cache_tokens, 2 * model.config.max_seq_len))
    lm = import_module("modelwright.evaluate.harness").EngineLM(
        Engine(model.to(resolved_device("auto")), sizes),
        Tokenizer.load(folder),
        uses_chat=config.uses_chat,
        info={"model": found.source.describe(), "model_digest": digest},
        progress=progress,
    )
    evaluator = import_module("lm_eval.evaluator")
    # lm-eval's own function for the commit lets git print "fatal: not a git repository".
    setattr(evaluator, "get_git_commit_hash", lambda: git_commit(Path.cwd()) or None)  # noqa: B010
    results = evaluator.simple_evaluate(
        model=lm,
        tasks=list(tasks.names),
        task_manager=tasks.manager,
        limit=config.limit or None,
        num_fewshot=None if config.num_fewshot < 0 else config.num_fewshot,
        apply_chat_template=config.uses_chat,
        bootstrap_iters=config.bootstrap_iters,
    )
    assert results is not None  # only ranks other than the first get None
    return dict(results)


def table(results: Mapping[str, Any]) -> str:
    """Returns lm-eval's own tables, of tasks and of any groups."""
    make_table = import_module("lm_eval.utils").make_table
    return "\n".join(make_table(results, *of) for of in ((), ("groups",)) if not of or results.get("groups"))


def as_json(results: Mapping[str, Any]) -> str:
    """Returns all results of lm-eval, single answers included."""
    plain = import_module("lm_eval.utils").handle_non_serializable
    return json.dumps(results, indent=1, ensure_ascii=False, default=plain)


def write_results(results: Mapping[str, Any], path: Path) -> Path:
    """Writes them atomically; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, as_json(results))
    return path


def _check_data(name: str, config: Any, file: str) -> None:
    """Raises `ConfigError` if a task, or one that a group defines, would download its data."""
    if isinstance(config, Sequence) and not isinstance(config, str):
        for one in config:
            _check_data(name, one, file)
    if not isinstance(config, Mapping):
        return
    _check_data(name, config.get("task"), file)
    name = config["task"] if isinstance(config.get("task"), str) else name
    source = config.get("dataset_path")
    if source is None:
        return
    if str(source) not in FILE_FORMATS and not Path(source).is_dir():
        raise ConfigError(
            f"{file}: task {name} wants to download the data set {source!r}; save its rows to a file and set "
            f"dataset_path to one of {', '.join(FILE_FORMATS)} and dataset_kwargs.data_files to the file"
        )
    kwargs = config.get("dataset_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"{file}: task {name}: dataset_kwargs: must be a mapping, got {kwargs!r}")
    for path in _texts(kwargs.get("data_files")):
        if "://" in path:
            raise ConfigError(f"{file}: task {name} wants to download {path}; data_files must be local paths")
        if not any(mark in path for mark in "*?[") and not Path(path).is_file():
            raise ConfigError(f"{file}: task {name}: data_files: {path} does not exist (seen from {Path.cwd()})")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)


def _parts(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of tasks, groups and tags that a group consists of."""
    if "group" not in config:
        return
    for one in config.get("task") or ():
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            yield from (str(one[key]) for key in ("task", "group") if isinstance(one.get(key), str))
            yield from _parts(one)
