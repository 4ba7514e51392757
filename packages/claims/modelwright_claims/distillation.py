"""Claim: progressive distillation leaves a student of a quarter of the parameters 97.4% of its teacher's score.

The method is the product's stage `distill` with its defaults (`objectives/distillation.py`): logits throughout, next to
them hidden states and then attention relations at the beginning, in a student that is pruned from the teacher. It
stands next to the same student with logits alone and with labels alone, and a student of the same shape from random
weights; each at its own best rate, at equal tokens and at equal time. The defaults were chosen on the validation split:
the published phases, one after the other at temperature 2.5, ended below labels alone there.
"""

import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_model, save_model

from modelwright.compress.prune import input_moments, prune
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import parse
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.distillation import Distillation
from modelwright.objectives.next_token import NextToken
from modelwright.objectives.teacher import TeacherModel
from modelwright.parallel.mesh import World
from modelwright.pipeline.stages.distill import DistillConfig
from modelwright.pipeline.stages.student import StudentConfig
from modelwright.train.objective import Objective, forward
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.experiment import Runner, Tuning, best_value, tune, with_value
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.statistics import Estimate, differences, estimate, exact, paired_t_test
from modelwright_claims.training_run import (
    ONE_THREAD,
    Outcome,
    Processes,
    Run,
    execute,
    heldout_batches,
    loss_on,
    train_once,
    work_on_job,
)
from modelwright_claims.workbench import Size, packed_rows, prepare_text

TEACHER, METHOD, LOGITS, PRUNED, SCRATCH = (
    "teacher",
    "three phases",
    "logits only",
    "pruned, labels only",
    "from scratch",
)
RIVALS = (LOGITS, PRUNED, SCRATCH)
IN_TIME, NEW_TEXT = ", as much time", ", new text"
"""The same arm with as many steps as fit into the method's time, and on text that is read only once."""
TEACHER_SIZE = Size(model_dim=128, num_layers=4, seq_len=128, batch_rows=8, num_steps=730)
NEW_TEXT_STEPS = 2500
"""Steps that the teacher trains on new text."""
SMALL_TEXT, LONGEST = 150_000, 1500
"""Number of tokens of the small text, and the maximum of each of its documents."""
STUDENT_SHAPE = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 88}
"""A quarter of the teacher's parameters: half of the layers and heads, 88 of 320 feed-forward channels."""
NUM_STEPS = 730
LOGITS_ALONE: dict[str, Any] = {"hidden": [0.0, 0.0, 1.0], "attention": [0.0, 0.0, 1.0], "logits": [1.0, 0.0, 1.0]}
TEACHER_RATES, RATES = (2e-3, 4e-3, 8e-3), (2e-3, 4e-3, 8e-3)
TUNING_SEED, TEACHER_SEED, SEEDS = 500, 510, (501, 502, 503, 504, 505)
TEACHER_TUNING = 4
"""The rate of the teacher on new text is tuned in runs that are shorter than its own by this factor."""
TUNING_BATCHES = 4
"""Held-out batches that a loss for tuning is taken of; scores are taken of all."""
NUM_TIMED_STEPS, NUM_ROUNDS, FIRST_TIMED_SEED = 40, 3, 900
NUM_PARTS = 4
"""Parts of a run whose steps are timed separately; the phases begin and end between them."""


@dataclass(frozen=True, kw_only=True)
class StudentRun(Run):
    """A run of a student; `start_from` is the teacher."""

    init: Literal["prune", "scratch"] = "prune"
    """Initialization of the student, as in the product's stage `student`."""
    learns: Literal["teacher", "labels"] = "teacher"
    distill: dict[str, Any] = field(default_factory=dict)
    """Changes to the product's stage `distill` that choose the learned signal of the teacher."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The scores of a model on held-out text. accuracy: the share of tokens that are its likeliest next one."""

    accuracy: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that was measured. scores: of the teacher, and of the students by arm, one for each seed; step_s:
    seconds of a step by arm and round; guess: accuracy of the best constant guess.
    """

    rates: Mapping[str, float]
    num_steps: Mapping[str, int]
    scores: Mapping[str, Sequence[Score]]
    step_s: Mapping[str, Sequence[float]]
    guess: float
    num_parameters: tuple[int, int]
    """Parameters of the teacher and of a student."""


@dataclass
class Bench:
    """Makes the runs of all arms. at_once: runs at the same time."""

    setting: Setting
    teacher: Size = TEACHER_SIZE
    shape: Mapping[str, int] = field(default_factory=lambda: STUDENT_SHAPE)
    num_steps: int = NUM_STEPS
    new_text_steps: int = NEW_TEXT_STEPS
    teacher_rates: Sequence[float] = TEACHER_RATES
    rates: Sequence[float] = RATES
    seeds: Sequence[int] = SEEDS
    processes: Processes = ONE_THREAD
    at_once: int = 2
    num_timed_steps: int = NUM_TIMED_STEPS
    num_rounds: int = NUM_ROUNDS

    def teacher_run(self, learning_rate: float) -> Run:
        size = replace(self.teacher, learning_rate=learning_rate)
        return Run(size=size, seed=TEACHER_SEED, heldout_batches=TUNING_BATCHES, processes=self.processes)

    def arms(self, teacher: Run) -> dict[str, StudentRun]:
        """Every arm reads as many tokens."""
        size = replace(self.teacher, num_steps=self.num_steps)
        method = StudentRun(
            size=size,
            model=dict(self.shape),
            heldout_batches=TUNING_BATCHES,
            processes=self.processes,
            start_from=teacher,
        )
        return {
            METHOD: method,
            LOGITS: replace(method, distill=LOGITS_ALONE),
            PRUNED: replace(method, learns="labels"),
            SCRATCH: replace(method, learns="labels", init="scratch"),
        }

    def in_time(self, arms: Mapping[str, StudentRun], step_s: Mapping[str, Sequence[float]]) -> dict[str, StudentRun]:
        """The rivals with as many steps as take the method's time, rounded up to twentieths of its steps."""
        seconds = {name: statistics.median(of) for name, of in step_s.items()}
        shares = {name: math.ceil(round(20 * seconds[METHOD] / seconds[name], 6)) / 20 for name in RIVALS}
        return {name + IN_TIME: with_steps(arms[name], round(shares[name] * self.num_steps)) for name in RIVALS}

    def compare(self) -> Comparison:
        """Compare all arms on the small text, and those of equal tokens on new text; the seconds of a step are the
        same.
        """
        runner = Runner(self.setting, execute_student)
        # Timed runs alternate and have the machine alone. Their teacher is hardly trained, which changes no time.
        teacher = with_steps(self.teacher_run(self.teacher_rates[0]), 1)
        arms = {name: with_steps(run, self.num_timed_steps) for name, run in self.arms(teacher).items()}
        step_s: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(self.num_rounds):
            runs = [replace(run, seed=FIRST_TIMED_SEED + number) for run in arms.values()]
            for name, outcome in zip(arms, runner.timed(runs), strict=True):
                step_s[name].append(mean_step_s(outcome))
        small = replace(self, setting=with_small_text(self.setting)).scored(step_s, in_time=True)
        size = replace(self.teacher, num_steps=self.new_text_steps)
        new = replace(self, teacher=size).scored(step_s, in_time=False, teacher_tuning=TEACHER_TUNING)
        return replace(
            small,
            rates=dict(small.rates) | {name + NEW_TEXT: rate for name, rate in new.rates.items()},
            num_steps=dict(small.num_steps) | {name + NEW_TEXT: steps for name, steps in new.num_steps.items()},
            scores=dict(small.scores) | {name + NEW_TEXT: scores for name, scores in new.scores.items()},
        )

    def scored(self, step_s: Mapping[str, Sequence[float]], *, in_time: bool, teacher_tuning: int = 1) -> Comparison:
        """Make the teacher, tune the students, and make and score them for each seed; all at their best rates."""
        runner = Runner(self.setting, execute_student)
        teacher = self.teacher_run(self.teacher_rates[0])
        shorter = with_steps(teacher, self.teacher.num_steps // teacher_tuning)
        rates = self.tuned(runner, {TEACHER: shorter}, self.teacher_rates, seed=TEACHER_SEED)
        teacher = self.teacher_run(rates[TEACHER])
        arms = self.arms(teacher)
        arms |= self.in_time(arms, step_s) if in_time else {}
        rates |= self.tuned(runner, arms, self.rates)
        final = {
            name: [replace(with_value(run, "learning_rate", rates[name]), seed=seed) for seed in self.seeds]
            for name, run in arms.items()
        }
        runner.keep([run for runs in final.values() for run in runs], at_once=self.at_once)
        batches = heldout_batches(self.setting, replace(teacher, heldout_batches=0))
        return Comparison(
            rates=rates,
            num_steps={TEACHER: self.teacher.num_steps, **{name: run.size.num_steps for name, run in arms.items()}},
            scores={TEACHER: [score(self.model(runner, teacher), batches)]}
            | {name: [score(self.model(runner, run), batches) for run in runs] for name, runs in final.items()},
            step_s=step_s,
            guess=constant_accuracy(batches),
            num_parameters=(self.shape_of(teacher).num_parameters, self.shape_of(arms[METHOD]).num_parameters),
        )

    def tuned(
        self, runner: Runner, variants: Mapping[str, Run], rates: Sequence[float], *, seed: int = TUNING_SEED
    ) -> dict[str, float]:
        """The best rate of each. The teacher, of which there is one, is tuned on its own seed: students of a teacher
        that happens to be weak would keep more of its score.
        """
        tuning = Tuning(values=rates, seeds=(seed,))
        found = tune(runner, variants, tuning, at_once=self.at_once)
        return {name: best_value(losses) for name, losses in found.items()}

    def shape_of(self, run: Run) -> ModelConfig:
        return run.model_config(prepare_text(self.setting).vocab_size)

    def model(self, runner: Runner, run: Run) -> Decoder:
        return loaded(self.shape_of(run), runner.weights(run))


def with_small_text(setting: Setting) -> Setting:
    """The setting with a part of its text to train on; the held-out text stays."""
    folder = setting.folder / "small_text"
    if not folder.exists():
        text = prepare_text(setting)
        documents = [one for one in text.train if len(one) <= LONGEST]
        random.Random(0).shuffle(documents)
        lengths = accumulate(len(one) for one in documents)
        chosen = [one for one, end in zip(documents, lengths, strict=True) if end <= SMALL_TEXT]
        folder.mkdir()
        write_atomic(folder / "prose.json", json.dumps(vars(replace(text, train=chosen))))
    return replace(setting, folder=folder, kept=setting.kept / folder.name if setting.kept else None)


def with_steps(run: Any, num_steps: int) -> Any:
    """The run with another number of steps."""
    return replace(run, size=replace(run.size, num_steps=num_steps))


def mean_step_s(outcome: Outcome) -> float:
    """Seconds of a mean step, whatever they are spent on: the mean over parts of the run of their median steps."""
    durations = [after - before for before, after in pairwise(outcome.steps["ended_s"])]
    length = len(durations) / NUM_PARTS
    parts = [durations[round(part * length) : round((part + 1) * length)] for part in range(NUM_PARTS)]
    return statistics.fmean(statistics.median(part) for part in parts)


def execute_student(setting: Setting, run: Run, *, begin: Path | None = None, keep: Path | None = None) -> Outcome:
    """`training_run.execute`, also for a student. begin: file of its teacher's weights."""
    if not isinstance(run, StudentRun):
        return execute(setting, run, begin=begin, keep=keep)
    module = "modelwright_claims.distillation"
    return execute(setting, run, begin=begin, keep=keep, module=module, train=train_student)


def train_student(
    setting: Setting, run: StudentRun, world: World, *, begin: Path, keep: Path | None = None, stage: Path | None = None
) -> Outcome:
    """Make the student and train it; its held-out loss is that of the labels, whatever it learns from."""
    vocab_size = prepare_text(setting).vocab_size
    assert run.start_from is not None
    teacher, shape = loaded(run.start_from.model_config(vocab_size), begin), run.model_config(vocab_size)
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        start, last = Path(folder) / "start.safetensors", keep or Path(folder) / "last.safetensors"
        if run.init == "prune":
            save_model(pruned(setting, run, teacher, shape), str(start))
        outcome = train_once(
            setting,
            run,
            world,
            begin=start if run.init == "prune" else None,
            keep=last,
            stage=stage,
            wrap=partial(learned, run, teacher, world),
        )
        student = loaded(shape, last)
    return replace(outcome, heldout_loss=loss_on(student, heldout_batches(setting, run)), curve=[])


def learned(run: StudentRun, teacher: Decoder, world: World, labels: NextToken) -> Objective:
    """The product's objective of a distillation, or the labels'."""
    if run.learns == "labels":
        return labels
    config = parse(DistillConfig, {"num_steps": run.size.num_steps, **run.distill})
    return Distillation(
        source=labels.source,
        teacher=TeacherModel.of(teacher, world),
        settings=config.settings(),
        num_steps=run.size.num_steps,
    )


def pruned(setting: Setting, run: Run, teacher: Decoder, shape: ModelConfig) -> Decoder:
    """The student as the product's stage makes it, by activations on training rows."""
    rows = packed_rows(setting, seq_len=run.size.seq_len, mode=run.mode, split="train")
    return prune(teacher, shape, input_moments(teacher, islice(rows.batches(1), StudentConfig().calibration_rows)))


def loaded(shape: ModelConfig, weights: Path) -> Decoder:
    """The decoder in a file, without modules that belonged to its training."""
    model = Decoder(shape)
    missing, _ = load_model(model, weights, strict=False)
    assert not missing, missing
    return model.eval()


def score(model: Decoder, batches: Iterable[TokenBatch]) -> Score:
    batches = list(batches)
    return Score(accuracy=accuracy(model, batches), loss=loss_on(model, batches))


@torch.no_grad()
def accuracy(model: Decoder, batches: Iterable[TokenBatch]) -> float:
    """The share of labels that are the model's likeliest token."""
    right, count = 0, 0
    for batch in batches:
        is_label_BT = batch.labels_BT != IGNORED
        likeliest_N = model.logits(forward(model, batch)[is_label_BT]).argmax(dim=-1)
        right += int((likeliest_N == batch.labels_BT[is_label_BT]).sum())
        count += batch.num_targets
    return right / count


def constant_accuracy(batches: Iterable[TokenBatch]) -> float:
    """The share of labels that are the most frequent one: no guess that is always the same is right more often."""
    labels_N = torch.cat([batch.labels_BT[batch.labels_BT != IGNORED] for batch in batches])
    return float(labels_N.bincount().max()) / len(labels_N)


def main() -> None:
    """Train a student of the job in a folder, as `training_run.main` does."""
    work_on_job(StudentRun, train_student)


TARGET_SHARE, TARGET_SIZE, SIGNIFICANT = 0.97, 0.25, 0.05
ACCURACY, LOSS, STEP = "accuracy, ", "held-out loss, ", "step, s, "
GUESS, PARAMETERS = "accuracy of the best constant guess", "parameters of teacher and student"
QUICK = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=20)
QUICK_SHAPE = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "ffn_dim": 32}


def measure(setting: Setting) -> Measurement:
    """All arms; in quick mode shortened, at one rate and on two seeds."""
    bench = Bench(setting)
    if setting.quick:
        bench = Bench(
            setting,
            teacher=QUICK,
            shape=QUICK_SHAPE,
            num_steps=20,
            new_text_steps=20,
            teacher_rates=TEACHER_RATES[1:2],
            rates=RATES[1:2],
            seeds=bench.seeds[:2],
            processes=Processes(),  # starting others takes longer than these runs
            at_once=1,
            num_timed_steps=9,
            num_rounds=1,
        )
    return measurement(bench.compare(), bench)


def measurement(found: Comparison, bench: Bench) -> Measurement:
    """Return scores of every arm by seed and seconds of a step by round."""
    samples: dict[str, Sequence[float]] = {GUESS: [found.guess], PARAMETERS: list(found.num_parameters)}
    for name, scores in found.scores.items():
        samples[ACCURACY + name] = [one.accuracy for one in scores]
        samples[LOSS + name] = [one.loss for one in scores]
    samples |= {STEP + name: seconds for name, seconds in found.step_s.items()}
    size, settings = bench.teacher, DistillConfig(num_steps=bench.num_steps)
    return Measurement(
        samples=samples,
        conditions=described(__name__, bench=bench, found=found, size=size)
        | {
            "student": f"{found.num_parameters[1]} parameters: "
            + ", ".join(f"{name} {value}" for name, value in bench.shape.items()),
            "steps": "; ".join(f"{name}: {steps}" for name, steps in found.num_steps.items()),
            "text": f"documents of at most {LONGEST} tokens of the interpreter's libraries, {SMALL_TEXT} tokens, "
            f"each of which the teacher reads {size.batch_tokens * size.num_steps / SMALL_TEXT:.1f} times; held out by "
            "module",
            "method": "the stage distill with its defaults, in a student that the stage student prunes by activations: "
            + "; ".join(f"{name} {list(getattr(settings, name))}" for name in ("hidden", "attention", "logits"))
            + f"; temperature {settings.temperature:g}, share of the labels {settings.label_share:g}",
            "rates tried": f"{', '.join(map(str, bench.rates))}; and beyond where the best was at an end",
            "rates": "; ".join(f"{name}: {rate:g}" for name, rate in found.rates.items()),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """The student from scratch has to be below the method; what other rivals must not be is above it."""
    judgment = Judgment()
    teacher, student = samples[PARAMETERS]
    size, share = "parameters, student to teacher", "share of the teacher's score"
    judgment.ask(size, exact(student / teacher), "x", "<=", TARGET_SIZE, what="parameters of the student")
    own, say = share_of_teacher(samples, METHOD), "{0.mean:.1%} of the teacher's score above chance"
    judgment.ask(f"{share}, {METHOD}", own, "x", ">=", TARGET_SHARE, what=share, say=say)
    for rival in (name + time for time in ("", IN_TIME) for name in RIVALS):
        with judgment.part():
            method, other = samples[ACCURACY + METHOD], samples[ACCURACY + rival]
            judgment.ask(f"{share}, {rival}", share_of_teacher(samples, rival), "x")
            limit = (">", 0.0) if rival.startswith(SCRATCH) else ()
            gap, say = differences(method, other), "accuracy {0.mean:+.4f} from " + rival
            judgment.ask(f"accuracy above {rival}", gap, "", *limit, say=say)
            figure = f"p-value against {rival}"
            if limit:
                otherwise = f"not different from {rival} with p < 0.05 (p = {{p}})"
                judgment.differs(method, other, figure, otherwise)
            elif gap.count > 1:
                p_value = paired_t_test(method, other).p_value
                judgment.ask(figure, p_value)
                is_better = gap.mean < 0 and p_value < SIGNIFICANT
                judgment.require(not is_better, f"{rival} is better: {-gap.mean:+.4f} (p = {p_value:.2g})")
    for arm in (METHOD, *RIVALS):
        say = f"on new text {arm} {{0.mean:.1%}}"
        judgment.note(
            f"{share}, {arm}{NEW_TEXT}", lambda arm=arm: share_of_teacher(samples, arm, NEW_TEXT), "x", say=say
        )
    judgment.show(samples, [GUESS])
    for name in names_between(samples, ACCURACY):
        judgment.show(samples, [ACCURACY + name])
        judgment.show(samples, [LOSS + name], "nats")
    judgment.show(samples, [STEP + name for name in names_between(samples, STEP)], "s")
    return judgment.verdict()


def share_of_teacher(samples: Samples, arm: str, text: str = "") -> Estimate:
    """Return the arm's share of its teacher's accuracy above the best constant guess. text: NEW_TEXT or nothing."""
    (guess,), (teacher,) = samples[GUESS], samples[ACCURACY + TEACHER + text]
    return estimate([(accuracy - guess) / (teacher - guess) for accuracy in samples[ACCURACY + arm + text]])


CLAIM = declared(__name__)


if __name__ == "__main__":
    main()
