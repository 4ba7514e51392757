"""A reward that is a Python function of the user, in a file of theirs."""

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.config import digest
from modelwright.core.errors import STOPPING, ConfigError
from modelwright.reward.reward import Reward, Sample, Score


@dataclass(frozen=True, kw_only=True)
class FunctionConfig:
    """A Python function, which is trusted: it runs in the training process."""

    path: str
    """`file.py:function`. The function takes a `Sample` and returns a number."""

    def __post_init__(self) -> None:
        file, _, name = self.path.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise ConfigError(f"path: {self.path!r} does not have the form file.py:function")

    def build(self, name: str) -> Reward:
        return FunctionReward(name, load_function(self.path))


@dataclass(frozen=True)
class FunctionReward:
    """An exception on one sample fails that sample alone."""

    name: str
    function: Callable[[Sample], float]

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        try:
            value = self.function(sample)
            number = float(value)
        except STOPPING:
            raise
        except Exception as error:
            return Score.failure(type(error).__name__, traceback.format_exc())
        if not math.isfinite(number):
            return Score.failure("not_finite", f"the function returned {value!r}")
        return Score(number)


def load_function(path: str) -> Callable[[Sample], Any]:
    """The function at `file.py:function`. Raises `ConfigError` with what importing the file said."""
    file, _, name = path.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(f"path: there is no file {file!r} (looked for in {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"reward_{digest(str(Path(file).resolve()))[:16]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except STOPPING[:2]:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"path: {file} cannot be imported ({_place(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == spec.name
        ]
        raise ConfigError(f"path: {file} has no function {name!r} (it has: {', '.join(functions) or 'none'})")
    return function


def _place(error: BaseException) -> str:
    """The exception in one line, with file and line where it was raised."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"
