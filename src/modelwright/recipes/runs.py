"""Runs from Python: `run`, `finetune` and `align` make the run folders that the commands make."""

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, Stopped, merge, nested_settings
from modelwright.core.progress import Progress
from modelwright.core.records import read_records
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run import RunResult, check_request, execute
from modelwright.pipeline.run_config import run_schema
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.dpo import DPO
from modelwright.pipeline.stages.grpo import GRPO
from modelwright.pipeline.stages.kto import KTO
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.ppo import PPO
from modelwright.pipeline.stages.report import REPORT
from modelwright.pipeline.stages.reward import REWARD
from modelwright.recipes.load import RUNS, Request, find_run, find_target, finetune_request, settings_of_target
from modelwright.recipes.load import load as load_request
from modelwright.recipes.models import Model, load
from modelwright.recipes.sources import FOLDER, read_sources
from modelwright.recipes.watch import OnStep, WatchedProgress, shown

if TYPE_CHECKING:
    import pandas as pd

METHODS = (DPO, KTO, GRPO, PPO)


@dataclass(frozen=True)
class Run:
    """The folder of a run. is_finished: false if a callback has stopped it; the same call goes on with it."""

    path: Path
    is_finished: bool = True
    result: RunResult | None = field(default=None, repr=False)

    @classmethod
    def open(cls, target: "str | os.PathLike[str]") -> "Run":
        """Opens a run by its folder or its name under runs/. Raises `ConfigError` if there is none."""
        return cls(find_run(os.fspath(target)).path)

    @property
    def report(self) -> Path | None:
        """The HTML page about the run; None before the stage `report`."""
        path = RunDir(self.path).report
        return path if path.is_file() else None

    @property
    def stages(self) -> list[str]:
        """The stages that have finished, in the order in which they first did."""
        return list(RunDir(self.path).read_info()["stages"])

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """The logged steps of each training stage, by its name."""
        return self._records("metrics.jsonl")

    def frame(self) -> "pd.DataFrame":
        """The same metrics as one pandas frame with a column `stage`. Needs pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise ConfigError("frame: needs pandas; pip install pandas, or use metrics()", code="missing") from None
        return pd.DataFrame([{"stage": name, **one} for name, steps in self.metrics().items() for one in steps])

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """Texts that the model wrote during each training, by stage."""
        return self._records("samples.jsonl")

    def model(self, *, stage: str = "", int8: bool = False) -> Model:
        """Loads the run's last finished model, that of `stage`, or the quantized one."""
        return load(self.path, stage=stage, int8=int8)

    def _records(self, name: str) -> dict[str, list[dict[str, Any]]]:
        stages = self.stages
        places = {stage: place for place, stage in enumerate(stages)}
        folders = sorted(self.path.glob(f"*/{name}"), key=lambda path: places.get(path.parent.name, len(stages)))
        return {path.parent.name: read_records(path) for path in folders}

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{len(steps)}</td><td>{html.escape(str(steps[-1].get('loss', '')))}"
            "</td></tr>"
            for name, steps in self.metrics().items()
            if steps
        )
        head = "<tr><th>stage</th><th>logged steps</th><th>last loss</th></tr>"
        return f"<p><b>Run</b> {html.escape(str(self.path))}</p><table>{head}{rows}</table>"


def run(
    target: "str | os.PathLike[str]",
    sources: Any = None,
    *,
    stages: Sequence[str] = (),
    run_dir: "str | os.PathLike[str]" = "",
    restart: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = False,
    **settings: Any,
) -> Run:
    """Brings a run to its end, as `modelwright run` does: finished stages are skipped, what was cut off goes on.

    target: a recipe, a YAML file or a run's folder; sources: as in `finetune`, by default those of the target; stages:
    only these; settings: nested (`sft={"num_steps": 20}`) or dotted (`**{"sft.num_steps": 20}`). Works in this process.
    Raises `ModelwrightError` with the text of the command line.
    """
    overrides, name = nested_settings(run_schema(), settings), os.fspath(target)
    if sources is not None:
        given = read_sources(sources)
        try:
            own = Path(name) if Path(name).is_dir() else RUNS / str({**settings_of_target(name), **overrides}["name"])
            placed = given.place((Path(run_dir) if os.fspath(run_dir) else own) / FOLDER)
        finally:
            given.close()
        overrides = merge({"data": {"sources": placed}}, overrides)
    request = load_request(name, overrides, os.fspath(run_dir), tuple(stages))
    return _carry_out(request, ["run", name], stages, restart, on_step, progress)


def finetune(
    model: "str | os.PathLike[str]",
    sources: Any,
    *,
    lora: bool = False,
    stages: Sequence[str] = (),
    run_dir: "str | os.PathLike[str]" = "",
    restart: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = False,
    **settings: Any,
) -> Run:
    """Fine-tunes a Hugging Face folder or a run on examples, as `modelwright finetune` does.

    sources: paths, records, texts or a frame (`read_sources`); those in memory are written into the run's
    folder under a name with their digest, so that the same call resumes; lora: train low-rank adapters only. The rest
    as in `run`.
    """
    overrides, base = nested_settings(run_schema(), settings), os.fspath(model)
    given = read_sources(sources)
    try:
        folder = Path(os.fspath(run_dir))
        if given.waiting and not os.fspath(run_dir):
            stem = f"{find_model(find_target(base)).source.name}-{Path(given.paths[0]).stem}"
            folder = RUNS / str(overrides.get("name", stem))
        placed = given.place(folder / FOLDER)
    finally:
        given.close()
    request = finetune_request(base, placed, overrides, os.fspath(run_dir), lora=lora, only=tuple(stages))
    return _carry_out(request, ["finetune", base, *placed], stages, restart, on_step, progress)


def align(
    model: "str | os.PathLike[str]",
    sources: Any,
    *,
    method: str = DPO.name,
    run_dir: "str | os.PathLike[str]" = "",
    restart: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = False,
    **settings: Any,
) -> Run:
    """Trains a model on preferences or rewards: the run of docs/alignment.md from this model.

    sources: pairs for `dpo`, labeled answers for `kto`; `grpo` and `ppo` take pairs, which train a reward model,
    or records with questions if `rewards` are among the settings of the stage. The rest as in `run`.
    """
    if method not in (names := [stage.name for stage in METHODS]):
        raise ConfigError(f"method: {method!r} is not one of {', '.join(names)}", code="choice")
    overrides = nested_settings(run_schema(), settings)
    found = find_model(find_target(os.fspath(model))).source
    learns_reward = method in (GRPO.name, PPO.name) and "rewards" not in overrides.get(method, {})
    order = [CLEAN.name, PACK.name, *([REWARD.name] if learns_reward else []), method, REPORT.name]
    defaults = {"name": f"{found.name}-{method}", "init_from": str(found.folder.resolve()), "stages": order}
    merged = merge(defaults, overrides)
    return run("quickstart", sources, run_dir=run_dir, restart=restart, on_step=on_step, progress=progress, **merged)


def _carry_out(
    request: Request,
    words: Sequence[str],
    only: Sequence[str],
    restart: bool,
    on_step: OnStep | None,
    progress: bool | Progress,
) -> Run:
    check_request(request.config, request.run, only, num_processes=1, restart=restart)
    with shown(progress) as display:
        watched = WatchedProgress(display, on_step)
        for note in request.notes:
            watched.note(note)
        try:
            result = execute(
                request.config,
                request.run,
                only=only,
                origin=request.origin,
                words=words,
                progress=watched,
                restart=restart,
            )
        except Stopped:
            if not watched.has_stopped:
                raise
            return Run(request.run.path, is_finished=False)
    return Run(request.run.path, result=result)
