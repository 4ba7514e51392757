"""From what the user names (a recipe, a YAML file, a run directory) to the configuration of a run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.config import dump, load_yaml, merge, parse
from modelwright.core.errors import ConfigError
from modelwright.core.rundir import RunDir
from modelwright.core.suggest import hub_hint, nearest
from modelwright.pipeline.config import STAGES, TRAININGS, RunConfig
from modelwright.pipeline.renamed import check_renamed, read_run_config
from modelwright.pipeline.run import previous_config
from modelwright.recipes.environment import environment_overrides, given_names
from modelwright.train.config import LENGTHS

_FOLDER = Path(__file__).parent
RECIPES = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))
RUNS = Path("runs")


@dataclass(frozen=True)
class Request:
    """What to run and where. `origin`: where the configuration came from, as text."""

    config: RunConfig
    run: RunDir
    origin: str


def load(target: str, overrides: Mapping[str, Any], run_dir: str = "", only: Sequence[str] = ()) -> Request:
    """The configuration that `target` names, with `overrides` merged over it.

    `target`: a recipe's name, a YAML file (which may contain `recipe: NAME` and set only what differs), or a run
    directory, whose own configuration is used; environment variables (`environment.py`) take precedence over it.
    `run_dir`: "" for the run's own folder, or `runs/<name>`; `only`: the stages named by `--stages`, see
    `select_stages`. Raises `ConfigError` if the target does not exist or a setting is wrong.
    """
    base, folder, origin = _base(target)
    base = merge(base, environment_overrides(os.environ, base))
    data = _lay_over(base, overrides)
    run = RunDir(Path(run_dir) if run_dir else folder or RUNS / str(data.get("name", "")))
    run.check()
    if only:
        previous = previous_config(run)
        data["stages"] = select_stages(only, previous.stages if previous else ())
    origin = ", ".join([origin, *given_names(os.environ)])
    return Request(parse(RunConfig, data), run, origin)


def recipe_file(name: str) -> Path:
    """The YAML file of a recipe; `name` is one of `RECIPES`."""
    return _FOLDER / f"{name}.yaml"


def recipe(name: str) -> RunConfig:
    """The configuration of a recipe; `name` is one of `RECIPES`."""
    return parse(RunConfig, load_yaml(recipe_file(name)))


def select_stages(only: Sequence[str], previous: Sequence[str]) -> list[str]:
    """The stages of a run when `--stages` names `only`, in the pipeline's order: these, and the ones that the run in
    the same folder (`previous`) already has. The same command therefore means the same when it is repeated.
    """
    for name in only:
        if name not in STAGES:
            raise ConfigError(f"stages: {name!r} is not one of {', '.join(STAGES)}")
    return [name for name in STAGES if name in only or name in previous]


def find_run(word: str) -> RunDir:
    """The run directory that the user means: its path, or its name under `runs/`. Raises `ConfigError` if there is
    none.
    """
    for path in (Path(word), RUNS / word):
        if os.path.isfile(path / "run.json"):
            return RunDir(path)
    raise ConfigError(f"{word}: is not a run directory (no run.json in it or in {RUNS / word}){hub_hint(word)}")


def _base(target: str) -> tuple[dict[str, Any], Path | None, str]:
    path = Path(target)
    if target in RECIPES:
        return dump(recipe(target)), None, f"recipe {target}"
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.yaml"):
            raise ConfigError(f"{target}: is a folder without config.yaml, so it is not a run directory")
        return read_run_config(path / "config.yaml"), path, str(path)
    if path.suffix in (".yaml", ".yml"):
        return _from_file(path), None, str(path)
    near = nearest(target, RECIPES)
    hint = f"; did you mean the recipe {near!r}?" if near else f" (recipes: {', '.join(RECIPES)})"
    raise ConfigError(f"{target}: is neither a recipe, nor a .yaml file, nor a run directory{hub_hint(target) or hint}")


def _from_file(path: Path) -> dict[str, Any]:
    data = load_yaml(path)
    base = data.pop("recipe", "")
    if not base:
        return {"name": path.stem} | data
    if not isinstance(base, str) or base not in RECIPES:
        raise ConfigError(f"{path}: recipe: {base!r} is not one of {', '.join(RECIPES)}")
    check_renamed(data)
    return _lay_over(dump(recipe(base)), {"name": path.stem} | data)


def _lay_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` merged into `base`; a training length in `over` replaces one that `base` gives in another unit."""
    cleared = dict(base)
    for stage in TRAININGS:
        before, after = base.get(stage), over.get(stage)
        if isinstance(before, Mapping) and isinstance(after, Mapping) and any(after.get(name) for name in LENGTHS):
            cleared[stage] = {name: value for name, value in before.items() if name not in LENGTHS}
    return merge(cleared, over)
