"""A reward that is a user's Python function in a file."""

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.config import STOPPING, ConfigError, digest
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
    """Calls the function for each sample. An exception on one sample fails that sample alone."""

    name: str
    function: Callable[[Sample], float]

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        scores: list[Score] = []
        for sample in samples:
            try:
                value = self.function(sample)
                number = float(value)
            except STOPPING:
                raise
            except Exception as error:
                scores.append(Score.failure(type(error).__name__, traceback.format_exc()))
                continue
            if math.isfinite(number):
                scores.append(Score(number))
            else:
                scores.append(Score.failure("not_finite", f"the function returned {value!r}"))
        return scores


def load_function(path: str) -> Callable[[Sample], Any]:
    """Loads the function `file.py:function`. Raises `ConfigError` with the error of importing the file."""
    file, _, name = path.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(f"path: the file {file!r} does not exist (looked for in {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"reward_{digest(str(Path(file).resolve()))[:16]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except STOPPING[:2]:
        raise
    except SyntaxError as error:
        raise ConfigError(f"path: {file} cannot be imported (line {error.lineno}: {error.msg})") from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"
        raise ConfigError(f"path: {file} cannot be imported ({text})") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == spec.name
        ]
        raise ConfigError(
            f"path: {file} does not define the function {name!r} (it has: {', '.join(functions) or 'none'})"
        )
    return function
