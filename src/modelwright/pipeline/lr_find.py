"""Learning-rate range test (Smith 2017, Cyclical Learning Rates for Training Neural Networks, section 3.3).

The start of the run's first training with the real trainer, in which the rate grows by equal factors from step to step,
stopped when the loss diverges. It proposes a peak rate: a tenth of the rate at which the smoothed loss was lowest, a
usual choice, because at the lowest point the run is about to diverge. It also reports the rate of the steepest descent,
which is Smith's. Works in its own folders: the run's folder is read, if it contains rows, and never written to.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from modelwright.core import VERSION
from modelwright.core.artifacts import RunDir, StageDir, write_atomic
from modelwright.core.config import ConfigError, ModelwrightError, Stopped, derive_seed
from modelwright.core.progress import Progress
from modelwright.data.images.store import open_images
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.model.hf import load_model
from modelwright.parallel.mesh import single
from modelwright.pipeline.process_group import use_threads
from modelwright.pipeline.report.blocks import Chart, Fact, Page, Section, Table, number
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.page import render
from modelwright.pipeline.resolve import resolve
from modelwright.pipeline.run import BorrowedRows, borrowed_rows
from modelwright.pipeline.run_config import previous_config
from modelwright.pipeline.stage import RunConfig, StageInputs
from modelwright.train.build import train
from modelwright.train.job import TrainJob
from modelwright.train.technique import StepInfo, observer
from modelwright.train.techniques.learning_rate import ScheduleConfig

SMOOTHING = 0.9
"""Weight of the past in the smoothed loss, with Adam's correction at the start."""
AWAY = 1.25
"""Ratio of the smoothed loss to its lowest value at which the test ends, after a tenth of the steps."""
SAFETY = 0.1
"""Proposed rate as a share of the rate of the lowest loss."""


@dataclass(frozen=True, kw_only=True)
class RangeConfig:
    """Range of rates and number of steps."""

    min_lr: float = 1e-6
    max_lr: float = 1.0
    num_steps: int = 150

    def __post_init__(self) -> None:
        if not 0.0 < self.min_lr < self.max_lr < math.inf:
            raise ConfigError(
                f"--min-lr: must be above 0 and below --max-lr, both finite, got {self.min_lr:g} and {self.max_lr:g}"
            )
        if self.num_steps < 20:
            raise ConfigError(f"--steps: must be at least 20, got {self.num_steps}; 100 to 300 are usual")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Result of the test. points: (rate, loss); smoothed: the same, smoothed; lowest, steepest: rates; diverged: True
    if the test ended before its last step.
    """

    points: Sequence[tuple[float, float]]
    smoothed: Sequence[tuple[float, float]]
    lowest: float
    steepest: float
    diverged: bool

    @property
    def proposal(self) -> float:
        return SAFETY * self.lowest


class RanAwayError(ModelwrightError):
    """Raised once the loss has diverged: higher rates give no further information."""


@dataclass
class Follow:
    """Records rates and losses, and stops the run when the loss diverges."""

    num_steps: int
    points: list[tuple[float, float]] = field(default_factory=list)

    def observe(self, info: StepInfo) -> None:
        self.points.append((info.learning_rate, info.loss))
        # The first tenth of the steps is exempt: few losses have a noisy average.
        values = [value for _, value in smooth(self.points, SMOOTHING)]
        away = len(values) > self.num_steps // 10 and values[-1] > AWAY * min(values)
        if away or not math.isfinite(info.loss):
            raise RanAwayError(f"step {info.step}: the loss diverges at a learning rate of {info.learning_rate:g}")


def range_test(
    config: RunConfig, run: RunDir, folder: Path, test: RangeConfig, *, words: Sequence[str], progress: Progress
) -> Sweep:
    """Sweeps the rate of the run's first training; writes `folder/lr-find.html` and `.json`. run: folder of the real
    run, whose packed rows are used if they match `config`; otherwise rows are made below `folder`.
    """
    if not config.trainings:
        raise ConfigError("stages: none of them trains, and lr-find searches the rate of a training; add one")
    first = config.trainings[0]
    assert first.rows is not None
    if first.rows.learned == "completions":
        raise ConfigError(
            f"stages: {first.name} generates its training data, which lr-find does not; name an earlier stage"
        )
    config = resolve(config, previous_config(run), progress)
    rows = borrowed_rows(config, run, folder, words, progress)
    use_threads(config.hardware.num_threads)
    result = sweep(config, rows, test, progress)
    write_sweep(result, config, test, folder)
    return result


def sweep(config: RunConfig, rows: BorrowedRows, test: RangeConfig, progress: Progress) -> Sweep:
    """Trains on packed rows, in this process alone; leaves no files."""
    packed = PackedRows(rows.folder / "train")
    stage, configured = config.trainings[0], config.first_training
    assert stage.fresh is not None
    # The stage's own settings, except length, rate and everything that costs time in addition to the steps.
    training = replace(
        configured,
        num_steps=test.num_steps,
        num_tokens=0,
        num_epochs=0.0,
        learning_rate=test.max_lr,
        schedule=ScheduleConfig(kind="exponential", warmup_fraction=0.0, initial_lr_fraction=test.min_lr / test.max_lr),
        eval_every_steps=0,
        checkpoint_every_steps=0,
        checkpoint_every_minutes=0.0,
        loss_spikes=replace(configured.loss_spikes, num_sigmas=0.0, rollback_after=0),
    )
    loader = PackedLoader(
        packed,
        batch_rows=training.batch_rows(packed.seq_len * stage.trained_rows),
        seed=derive_seed(config.seed, stage.name, "order"),
    )
    world = single(config.hardware.device)
    follow, diverged = Follow(test.num_steps), False
    with tempfile.TemporaryDirectory(prefix="modelwright-lr-find-") as scratch:
        inputs = StageInputs(
            config=config,
            training=training,
            loader=loader,
            plan=loader,
            images=open_images(rows.folder, "train"),
            parents=rows.parents,
            world=world,
            folder=Path(scratch),
            note=progress.note,
        )
        try:
            train(
                TrainJob(
                    model=load_model(Path(config.init_from)) if config.init_from else stage.fresh(config),
                    objective=stage.new_objective(inputs),
                    config=training,
                    num_steps=test.num_steps,
                    stage=StageDir(Path(scratch)),
                    seed=derive_seed(config.seed, stage.name),
                    name="lr-find",
                    input_digest="lr-find",
                    techniques=[observer("lr_range", follow.observe)],
                ),
                world,
                progress,
            )
        except RanAwayError:
            diverged = True
        except Stopped as error:
            raise Stopped("stopped; the next test starts over", error.exit_code - 128) from None
    return judge(follow.points, diverged=diverged)


def judge(points: Sequence[tuple[float, float]], *, diverged: bool) -> Sweep:
    """Finds the lowest point and the steepest descent of the smoothed loss over the logarithm of the rate. Raises
    `ModelwrightError` if the loss diverged at once.
    """
    finite = [(rate, loss) for rate, loss in points if math.isfinite(loss)]
    smoothed = smooth(finite, SMOOTHING)
    if len(smoothed) < 3:
        raise ModelwrightError("the loss diverged within the first steps; start at a lower rate (--min-lr)")
    # Central differences: each slope spans two steps and belongs to the step between them.
    slopes = [(b[1] - a[1]) / math.log(b[0] / a[0]) for a, b in zip(smoothed, smoothed[2:], strict=False)]
    return Sweep(
        points=finite,
        smoothed=smoothed,
        lowest=min(smoothed, key=lambda point: point[1])[0],
        steepest=smoothed[1 + slopes.index(min(slopes))][0],
        diverged=diverged,
    )


def write_sweep(found: Sweep, config: RunConfig, test: RangeConfig, folder: Path) -> None:
    """Writes the chart as one page, and the figures as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {**vars(found), "proposal": found.proposal, "test": vars(test)}
    write_atomic(folder / "lr-find.json", json.dumps(record, indent=1))
    lines = [
        Line("every step", [(math.log10(rate), loss) for rate, loss in found.points], faint=True),
        Line("smoothed", [(math.log10(rate), loss) for rate, loss in found.smoothed]),
    ]
    lowest = min(loss for _, loss in found.smoothed)
    chart = line_chart(
        lines, name="lr-find", x_label="log10 of the learning rate", y_label="nats per token",
        top=AWAY * max(found.smoothed[0][1], lowest),
    )  # fmt: skip
    rows = [
        ["proposed peak", number(found.proposal, 3), "a tenth of the rate of the lowest loss"],
        ["lowest smoothed loss", number(found.lowest, 3), f"{number(lowest)} nats"],
        ["steepest fall", number(found.steepest, 3), "of the smoothed loss over the logarithm of the rate"],
    ]
    end = "stopped when the loss ran away" if found.diverged else "the loss did not run away: try a higher --max-lr"
    blocks = [Chart("Loss over the learning rate", chart, f"{len(found.points)} steps; {end}."),
              Table(["result", "rate", "explanation"], rows, "Results in numbers", numeric=(1,))]  # fmt: skip
    page = Page(
        title=f"{config.name}: learning-rate range test",
        subtitle=f"{number(test.min_lr, 3)} to {number(test.max_lr, 3)}",
        facts=[
            Fact("Proposed peak rate", number(found.proposal, 3), f"configured {config.first_training.learning_rate:g}")
        ],
        sections=[Section("lr-find", "Range test", blocks)],
        footer=f"Written by Modelwright {VERSION}. This file needs no network.",
    )
    write_atomic(folder / "lr-find.html", render(page))
