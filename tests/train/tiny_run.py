"""A tiny training run that ends in a second, and the parts to build other runs like it."""

import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from modelwright.core.artifacts import StageDir
from modelwright.core.config import parse
from modelwright.core.progress import Progress, SilentProgress
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.build import train
from modelwright.train.checkpoint import writer
from modelwright.train.checkpoint.files import read_weights
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob, TrainResult
from modelwright.train.objective import Objective, Terms
from modelwright.train.technique import StepInfo, Technique, TechniqueBuilder

ROWS, LENGTH, VOCABULARY = 8, 32, 64
SHAPE = ModelConfig(
    vocab_size=VOCABULARY, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, ffn_dim=64, head_dim=8,
    max_seq_len=LENGTH,
)  # fmt: skip
TWO_RANK_LAYOUTS: dict[str, dict[str, Any]] = {
    "one copy": {},
    "copies": {"shared_memory": False},
    "zero 3": {"zero_stage": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
SETTINGS = {
    "num_steps": 12,
    "batch_tokens": ROWS * LENGTH,
    "learning_rate": 1e-2,
    "precision": {"policy": "fp32"},
    "eval_every_steps": 3,
    "checkpoint_every_steps": 2,
    "checkpoint_every_minutes": 0.0,
}


@dataclass(frozen=True)
class Rows:
    """Batch `index` is a function of its number; documents, padding and counted tokens differ much from row to row."""

    num_rows: int = ROWS
    num_batches_per_epoch: int = 5
    calls: list[int] = field(default_factory=list)

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        self.calls.append(index)
        share = self.num_rows // world_size
        rows = [_row(index, row) for row in range(rank * share, (rank + 1) * share)]
        tokens, labels, positions, segments = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return TokenBatch(input_ids_BT=tokens, labels_BT=labels, positions_BT=positions, segments_BT=segments)


def _row(index: int, row: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1000 * index + row)
    first = int(torch.randint(VOCABULARY, (1,), generator=draw))
    tokens = (first + 7 * torch.arange(LENGTH)) % VOCABULARY
    cut = int(torch.randint(2, LENGTH, (1,), generator=draw))
    used = LENGTH - (row % 3) * 9
    places = torch.arange(LENGTH)
    segments = torch.where(places < cut, 0, 1)
    segments[used:] = -1
    positions = torch.where(places < cut, places, places - cut)
    labels = tokens.roll(-1)
    ends = torch.cat([segments[1:] != segments[:-1], torch.tensor([True])])
    hidden = torch.rand(LENGTH, generator=draw) < 0.12 * row
    labels[ends | (segments < 0) | hidden] = IGNORED
    return tokens, labels, positions, segments.int()


@dataclass(frozen=True)
class Float64Objective(Objective):
    """Two terms in float64, with weights of their own, to check the loop's arithmetic to the last digits."""

    needs = frozenset()
    source: Rows
    further_modules: Any = None

    def own_modules(self, config):
        return self.further_modules(config) if self.further_modules else {}

    def batches(self, model, *, first, rank, world_size):
        return NextToken(self.source).batches(model, first=first, rank=rank, world_size=world_size)

    def weights(self, batch):
        return {"nll": (batch.labels_BT != IGNORED).sum(), "norm": (batch.segments_BT >= 0).sum() * 0.5}

    def losses(self, output, batch, model):
        nll = F.cross_entropy(
            model.logits(output).flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return Terms({"nll": nll, "norm": 0.01 * (output.square().mean(-1) * (batch.segments_BT >= 0)).sum()})


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, change):
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return ctx.change(gradients[0]), None


def flows_back(value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The value; what flows back through it is changed."""
    return _Changed.apply(value, change)  # pyright: ignore[reportReturnType]


@dataclass
class Full(Objective):
    """An objective that, in batches `first` to `last`, cannot learn parts of more than `most_rows` rows: no memory."""

    inner: NextToken
    first: int
    last: int
    most_rows: int
    number: int = -1

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        found = self.inner.batches(model, first=first, rank=rank, world_size=world_size)
        for self.number, batch in enumerate(found, start=first):
            yield batch

    def weights(self, batch):
        return self.inner.weights(batch)

    def losses(self, output, batch, model):
        if output.requires_grad and self.first <= self.number <= self.last and batch.num_rows > self.most_rows:
            torch.empty(2**60)  # far more than any machine has
        return self.inner.losses(output, batch, model)


@dataclass
class StopAfter:
    """Asks for a stop after a step."""

    step: int

    def observe(self, info: StepInfo) -> None:
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def watching(**observers: Any) -> list[TechniqueBuilder]:
    """Techniques that show finished steps to these observers; a state is kept in the checkpoint."""
    return [
        always(
            Technique(
                name=name,
                on_step_end=observer.observe,
                every=getattr(observer, "every", 1),
                state=observer if hasattr(observer, "state_dict") else None,
                needs=frozenset(),
            )
        )
        for name, observer in observers.items()
    ]


def always(technique: Technique) -> TechniqueBuilder:
    """Builds this technique under any layout."""
    return lambda run: technique


def settings(**changes) -> TrainConfig:
    return parse(TrainConfig, {**SETTINGS, **changes}, constants=True)


def tiny_model(dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(SHAPE)
    model.init_weights(0)
    return model.to(dtype)


def run(
    folder: Path,
    config: TrainConfig | None = None,
    *,
    objective=None,
    model=None,
    world: World | None = None,
    progress: Progress | None = None,
    **more,
) -> TrainResult:
    config = config or settings()
    arguments = {"seed": 1, "name": "tiny", "input_digest": "d", "peak_flops": 1e12}
    arguments |= {"heldout": [Rows().batch(900), Rows(num_rows=3).batch(901), Rows().batch(902)]} | more
    job = TrainJob(
        model=tiny_model() if model is None else model,
        objective=NextToken(Rows()) if objective is None else objective,
        config=config,
        num_steps=config.resolve_num_steps(5),
        stage=StageDir(folder),
        **arguments,
    )
    return train(job, world or single(), progress or SilentProgress())


def run_in_float64(folder: Path, config: TrainConfig, **more) -> Decoder:
    """The same run in float64."""
    model = tiny_model(torch.float64)
    run(folder, config, model=model, objective=Float64Objective(Rows()), **more)
    return model


SHORT = {"num_steps": 3, "eval_every_steps": 0, "checkpoint_every_steps": 0, "keep_best": False}


def weights_of_layout(
    model: Decoder, folder: Path, world: World, parallel: Mapping[str, Any], **changes: Any
) -> dict[str, torch.Tensor]:
    """The weights of a float64 model after three steps under a layout. changes: to the settings."""
    torch.set_num_threads(1)
    accumulation = {"gradient_accumulation_steps": 2} if "pipeline" in parallel else {}
    run(
        folder,
        settings(**SHORT, **accumulation, **changes),
        model=model,
        objective=Float64Objective(Rows()),
        world=world,
        parallel=ParallelConfig(**parallel),
        heldout=[],
    )
    return {name: value.clone() for name, value in model.state_dict().items()}


def final_weights(folder: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return read_weights(folder / "checkpoints", step)


def train_under_fire(
    folder: Path, seed: int, num_kills: int, *, begin: Callable[..., object] = run, **changes: Any
) -> list[int]:
    """Start the run again and again in forked processes; kill each at a random moment or amid a checkpoint.

    begin: as `run`; changes: to the settings. Returns the signal that ended each of them, and the exit code of a last
    run, which is left alone.
    """
    draw, signals, start = random.Random(seed), [], partial(_start, folder, settings(**changes), begin)
    for attempt in range(num_kills):
        if attempt % 2:
            child = start(die_in_file=draw.randint(1, 5))
        else:
            seen = _num_records(folder)
            child = start()
            while (
                _num_records(folder) == seen
                and os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            ):
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
        signals.append(-_exit_code(child))
    return [*signals, _exit_code(start())]


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _num_records(folder: Path) -> int:
    """Lines of the metrics so far: they change as soon as a started run makes a step (or takes records back)."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _start(folder: Path, config: TrainConfig, begin: Callable[..., object], *, die_in_file: int = 0) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if die_in_file:
                _die_while_writing(die_in_file)
            begin(folder, config)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # an error must not go on in a second process of the tests
    return child


def _die_while_writing(num_files: int) -> None:
    """From the `num_files`-th tensor file on: write half of it and die."""
    save, left = writer.save_file, [num_files]

    def save_half(tensors, path):
        save(tensors, path)
        left[0] -= 1
        if left[0] == 0:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    writer.save_file = save_half
