"""A single training run on the text of the workbench, described by plain data, and its outcome.

Runs of the same seed start from the same weights and take the rows in the same order. A run goes through the product's
training loop, or through the plain one (`plain_training`), in this process or in separate processes.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from safetensors.torch import load_model, save_model

from modelwright.core.artifacts import StageDir, write_atomic
from modelwright.core.config import ModelwrightError, derive_seed, dump, merge, parse
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows, PlannedLoader, build_loader
from modelwright.data.rows.order import BatchingConfig
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World, join_world, single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import StrategyFactory, TrainJob, configured_strategy
from modelwright.train.objective import Objective, forward
from modelwright.train.technique import StepInfo, TechniqueBuilder, observer
from modelwright.train.techniques.adaptive_precision import CHANGES, MACHINE
from modelwright_claims.batches import Augmentation, Mixture, Wild, WildBatches, augmented_batches, mixed_stream
from modelwright_claims.claim import Setting
from modelwright_claims.launch import run_ranks
from modelwright_claims.netns import Network, star
from modelwright_claims.plain_training import train_plainly
from modelwright_claims.workbench import KINDS, HeldOut, Mode, Size, TextKind, device, packed_rows, prepare_text

AnyRun = TypeVar("AnyRun", bound="Run")
NUM_UNTIMED_STEPS = 3
HELDOUT_ROWS = 32
"""Rows of a held-out batch."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run."""

    hosts: int = 1
    per_host: int = 1
    threads: int = 0
    """Threads of each process. 0 runs the single process of a run as this one, with its own threads."""
    mbit: float | None = None
    """Rate of the links between hosts, which are network namespaces then; 0 does not limit it. With None the hosts are
    processes of this one that share no memory."""

    @property
    def count(self) -> int:
        return self.hosts * self.per_host


ONE_THREAD = Processes(threads=1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run. Everything that its outcome depends on is in here, in the sources or in the machine."""

    size: Size
    settings: dict[str, Any] = field(default_factory=dict)
    """Changes to `Size.train_config`, as in a configuration file."""
    model: dict[str, Any] = field(default_factory=dict)
    """Changes to `Size.model_config`."""
    seed: int = 0
    loop: Literal["modelwright", "plain"] = "modelwright"
    mode: Mode = "best_fit"
    """The method that makes training rows of documents; held-out rows are always packed."""
    mixture: Mixture | None = None
    """Sources of the training text with their shares; None for prose alone."""
    wild: Wild | None = None
    augmentation: Augmentation | None = None
    """Changes to documents while the model trains on them."""
    heldout: HeldOut = "test"
    heldout_batches: int = 0
    """Held-out batches of an evaluation; 0 takes all."""
    evaluated: tuple[TextKind, ...] = ()
    """Kinds of text whose held-out loss is taken at the end, in `Outcome.losses`."""
    processes: Processes = Processes()
    start_from: "Run | None" = None
    """The run whose last weights this one starts from, on rows in another order."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Measured seconds of number formats, which adaptive precision uses in place of a measurement."""

    def model_config(self, vocab_size: int) -> ModelConfig:
        return parse(ModelConfig, merge(dump(self.size.model_config(vocab_size)), self.model), constants=True)

    def train_config(self) -> TrainConfig:
        return parse(TrainConfig, merge(dump(self.size.train_config()), self.settings), constants=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one training run, as its first rank saw it."""

    heldout_loss: float
    """The final loss, in nats per token; infinite for a run that diverged."""
    seconds: float
    """Seconds from the start of the first step to the end of the last one."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out loss) of each evaluation."""
    steps: dict[str, list[float]] = field(default_factory=dict)
    """Metrics by name, one value for each step. `ended_s`: when the step ended, counted from the first one's end."""
    losses: dict[str, float] = field(default_factory=dict)
    """Held-out losses by kind of text."""
    bytes_sent: int | None = None
    formats: dict[str, str] = field(default_factory=dict)
    """The last number formats of the parts of the model whose format changed."""
    diverged: str = ""
    """Why the loop gave the run up; "" when it did not."""

    @property
    def final_loss(self) -> float:
        """The mean of the last three evaluations; infinite for a run that diverged."""
        last = [loss for _, loss in self.curve[-3:]] or [self.heldout_loss]
        return statistics.fmean(last) if not self.diverged and all(map(math.isfinite, last)) else math.inf

    @property
    def step_s(self) -> float:
        """The median step, without the first ones."""
        return statistics.median(self.steps["step_time_s"][NUM_UNTIMED_STEPS:])

    @property
    def tokens_per_s(self) -> float:
        """Real tokens of a mean batch over the median step."""
        return statistics.fmean(self.steps["num_tokens"][NUM_UNTIMED_STEPS:]) / self.step_s

    @property
    def skipped(self) -> list[int]:
        """The steps, from 1, that left their update out."""
        return [step for step, skipped in enumerate(self.steps["skipped"], start=1) if skipped]

    def pace(self, first: int) -> float:
        """Return the tokens per second of all steps from index `first` on, whatever they spent their time on."""
        return sum(self.steps["num_tokens"][first:]) / sum(self.steps["step_time_s"][first:])

    def steps_to(self, target: float) -> float:
        """Return the steps until the held-out loss is down to the target, by linear interpolation between evaluations.

        Infinite when it never is.
        """
        if self.curve and self.curve[0][1] <= target:
            return self.curve[0][0]
        for (before, above), (step, loss) in pairwise(self.curve):
            if loss <= target:
                return step - (step - before) * (target - loss) / (above - loss)
        return math.inf


@dataclass
class StepLog:
    """Keeps every step's metrics and when it ended."""

    counts_interfaces: bool = False
    """True to read the bytes that the host's network interfaces have sent, into `interface_bytes`."""
    ended_s: list[float] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)

    METRICS = ("loss", "num_tokens", "step_time_s", "comm_s", "skipped")
    SCALARS = ("executed_flops", "staleness", "augmentation_strength")

    def observe(self, info: StepInfo) -> None:
        self.ended_s.append(time.perf_counter())
        values = {name: float(getattr(info, name)) for name in self.METRICS}
        values |= {name: info.scalars[name] for name in self.SCALARS if name in info.scalars}
        if self.counts_interfaces:
            values["interface_bytes"] = float(interface_bytes())
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)

    @property
    def steps(self) -> dict[str, list[float]]:
        return {**self.columns, "ended_s": [ended - self.ended_s[0] for ended in self.ended_s]}

    @property
    def seconds(self) -> float:
        return self.ended_s[-1] - self.ended_s[0] + self.columns["step_time_s"][0] if self.ended_s else 0.0


def interface_bytes() -> int:
    """Return the bytes that this host's network interfaces have sent, without the loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def prepare(setting: Setting, run: Run) -> None:
    """Make the rows that a run needs, so that processes side by side need not."""
    for kind in KINDS if run.mixture or run.evaluated else KINDS[:1]:
        packed_rows(setting, seq_len=run.size.seq_len, mode=run.mode, split="train", kind=kind)
        packed_rows(setting, seq_len=run.size.seq_len, mode="best_fit", split=run.heldout, kind=kind)


def execute(
    setting: Setting,
    run: Run,
    *,
    begin: Path | None = None,
    keep: Path | None = None,
    module: str = "modelwright_claims.training_run",
    train: Callable[..., Outcome] | None = None,
) -> Outcome:
    """Make one run. begin: file of weights to start from; keep: where the last weights go; train: what trains as one
    rank, `train_once` with None; module: the program of a process that does so, by `work_on_job`.

    Raises `ModelwrightError` when a process fails.
    """
    if not run.processes.threads:
        if run.processes.count != 1:
            raise ValueError("a run of several processes has to say how many threads each of them has")
        return (train or train_once)(setting, run, single(device()), begin=begin, keep=keep)
    prepare(setting, run)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=setting.folder)))
        hosts, mbit = run.processes.hosts, run.processes.mbit
        network = None if mbit is None else stack.enter_context(Network(star(hosts, mbit=mbit)))
        job = {"run": dump(run), "begin": str(begin or ""), "keep": str(keep or "")}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        run_ranks(
            module,
            [str(setting.folder), str(folder)],
            num_ranks=run.processes.count,
            ranks_per_host=run.processes.per_host,
            threads=run.processes.threads,
            network=network,
        )
        return Outcome(**json.loads((folder / "outcome.json").read_text(encoding="utf-8")))


def train_once(
    setting: Setting,
    run: Run,
    world: World,
    *,
    begin: Path | None = None,
    keep: Path | None = None,
    stage: Path | None = None,
    wrap: Callable[[NextToken], Objective] = lambda objective: objective,
    strategy: StrategyFactory = configured_strategy,
    techniques: Sequence[TechniqueBuilder] = (),
) -> Outcome:
    """Train as one rank of a run. stage: folder that all ranks share; wrap: changes the objective of training;
    techniques: besides those of the configuration.
    """
    model = Decoder(run.model_config(prepare_text(setting).vocab_size))
    model.init_weights(derive_seed(run.seed, "weights"))
    if begin is not None:
        load_model(model, begin)
    own, of_batches = _objective(setting, run)
    objective, techniques = wrap(own), (*of_batches, *techniques)
    heldout = heldout_batches(setting, run)
    if run.loop == "plain":
        batches = objective.batches(model, first=0, rank=world.rank, world_size=world.size)
        config = run.train_config()
        seconds = train_plainly(model, batches, config, num_steps=run.size.num_steps, world=world)
        return Outcome(heldout_loss=loss_on(model, heldout), seconds=seconds)
    with _stage(setting, stage) as folder:
        outcome = _train(setting, run, world, model, objective, heldout, folder, strategy, techniques)
    if keep is not None and world.is_first:
        save_model(model, str(keep))
    return outcome


def _objective(setting: Setting, run: Run) -> tuple[Any, Sequence[TechniqueBuilder]]:
    """Return the objective of training, next tokens of the run's text in its seed's order, and the techniques that
    belong to its batches.
    """
    size, vocab_size = run.size, prepare_text(setting).vocab_size

    def rows_of(kind: TextKind) -> PackedRows:
        return packed_rows(setting, seq_len=size.seq_len, mode=run.mode, split="train", kind=kind)

    if run.mixture:
        stream = mixed_stream(
            {kind: rows_of(kind) for kind in KINDS},
            run.mixture,
            num_steps=size.num_steps,
            batch_rows=size.batch_rows,
            seed=run.seed,
            vocab_size=vocab_size,
        )
        return NextToken(stream), ()
    order = derive_seed(run.seed, "order" if run.start_from is None else "order of more training")
    if run.augmentation:
        loader, techniques = augmented_batches(
            setting, run.augmentation, seq_len=size.seq_len, batch_rows=size.batch_rows, seed=run.seed, order=order
        )
        return NextToken(loader), techniques
    objective = NextToken(batch_loader(rows_of("prose"), size, run.mode, order))
    return (WildBatches(objective, run.wild, vocab_size, run.seed) if run.wild else objective), ()


def batch_loader(rows: PackedRows, size: Size, mode: Mode, seed: int) -> PackedLoader | PlannedLoader:
    """Return the batches of a run; of rows in length buckets, those that fit into `size.batch_tokens` with padding."""
    return build_loader(
        rows,
        BatchingConfig(),
        batch_rows=size.batch_rows,
        by_tokens=mode == "length_buckets",
        seed=seed,
        num_steps_of=lambda num_batches: size.num_steps,
        row_losses=lambda: np.zeros(0, np.float32),
    )


def heldout_batches(setting: Setting, run: Run, kind: TextKind = "prose") -> list[TokenBatch]:
    rows = packed_rows(setting, seq_len=run.size.seq_len, mode="best_fit", split=run.heldout, kind=kind)
    return list(islice(rows.batches(HELDOUT_ROWS), run.heldout_batches or None))


def _train(
    setting: Setting,
    run: Run,
    world: World,
    model: Decoder,
    objective: Objective,
    heldout: Sequence[TokenBatch],
    folder: Path,
    strategy: StrategyFactory,
    techniques: Sequence[TechniqueBuilder],
) -> Outcome:
    config, stage = run.train_config(), StageDir(folder)
    log = StepLog(counts_interfaces=run.processes.mbit is not None)
    if run.speeds:
        (folder / MACHINE).write_text(json.dumps(run.speeds), encoding="utf-8")
    diverged, bytes_sent, heldout_loss = "", None, math.inf
    try:
        result = train(
            TrainJob(
                model=model,
                objective=objective,
                config=config,
                num_steps=config.num_steps,
                stage=stage,
                seed=run.seed,
                name=f"seed {run.seed}",
                input_digest="claim",
                heldout=heldout,
                techniques=[observer("step_log", log.observe), *techniques],
                strategy=strategy,
                parallel=ParallelConfig(shared_memory=run.processes.hosts == 1),
            ),
            world,
            setting.progress,
        )
        bytes_sent, heldout_loss = result.bytes_sent, result.heldout_loss
    except ModelwrightError as error:
        if type(error) is not ModelwrightError:  # its subclasses are mistakes in the run's description or the machine's
            raise
        diverged = str(error)
    changes = folder / CHANGES
    lines = changes.read_text(encoding="utf-8").splitlines() if changes.exists() else []
    return Outcome(
        heldout_loss=heldout_loss if math.isfinite(heldout_loss) else math.inf,
        seconds=log.seconds,
        curve=column(read_records(stage.metrics), "heldout_loss") if world.is_first else [],
        steps=log.steps,
        losses={
            kind: heldout_loss if kind == "prose" else loss_on(model, heldout_batches(setting, run, kind))
            for kind in run.evaluated
        },
        bytes_sent=bytes_sent,
        formats={change["part"]: change["to"] for change in map(json.loads, lines)},
        diverged=diverged,
    )


@torch.no_grad()
def loss_on(model: Decoder, batches: Sequence[TokenBatch]) -> float:
    """Return the mean loss in nats per token."""
    total, count = 0.0, 0
    for batch in batches:
        batch = batch.to(model.norm.weight.device)
        total += float(model.cross_entropy(forward(model, batch), batch.labels_BT, chunk_tokens=512))
        count += batch.num_targets
    return total / count


@contextmanager
def _stage(setting: Setting, stage: Path | None) -> Iterator[Path]:
    if stage is not None:
        yield stage
        return
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        yield Path(folder)


def work_on_job(kind: type[AnyRun], train: Callable[..., Outcome]) -> None:
    """Train as one rank of the job in a folder: `python -m MODULE TEXT_FOLDER JOB_FOLDER`."""
    text, folder = map(Path, sys.argv[1:])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    run = parse(kind, job["run"])
    begin, keep = (Path(job[name]) if job[name] else None for name in ("begin", "keep"))
    torch.set_num_threads(run.processes.threads)
    setting = Setting(folder=text, quick=False, progress=SilentProgress())
    with join_world(torch.device("cpu") if run.processes.count > 1 else device()) as world:
        outcome = train(setting, run, world, begin=begin, keep=keep, stage=folder / "stage")
        if world.is_first:
            write_atomic(folder / "outcome.json", json.dumps(asdict(outcome)))


def main() -> None:
    """See `work_on_job`."""
    work_on_job(Run, train_once)


if __name__ == "__main__":
    main()
