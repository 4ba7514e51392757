"""Runs of the tiny model, one after the other on the same ranks; the cases are those of `wired_cases`.

Each case has a name, settings, a layout and a mishap. Each rank writes FOLDER/<folder of the case>/<name>-<rank>.json:
how the run ended, and its last weights beside that.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tiny_run
import torch
from safetensors.torch import save_file

from modelwright.core.config import ModelwrightError, parse
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.train.objective import Objective, Terms
from modelwright.train.technique import StepInfo

FACTORS = {"wild": 1000.0, "nan": float("nan"), "overflow": 0.0}
NOTHING = {"kind": "", "step": 0, "rank": 0, "last": 0, "stop": 0}


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@dataclass
class Mishap:
    """Lets something happen after `step` on `rank`: stop, flip, die or hang; `stop`: another step."""

    kind: str
    step: int
    rank: int
    world: World
    model: Decoder
    stop: int = 0
    every: int = 1
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def observe(self, info: StepInfo) -> None:
        self.scales.append(info.scalars.get("loss_scale", 0.0))
        self.skipped += [info.step] * info.skipped
        if info.step == self.stop and self.world.is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        if info.step != self.step or self.world.rank != self.rank:
            return
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "hang":
            threading.Event().wait()
        elif self.kind == "flip":
            with torch.no_grad():
                self.model.embedding.weight.view(torch.int32)[3, 1] ^= 1


@dataclass
class Wild(Objective):
    """The tiny objective, with losses `factor` times as large in some batches; 0: with gradients that overflow."""

    inner: NextToken
    wild_batches: range
    factor: float
    is_wild: bool = False

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        found = self.inner.batches(model, first=first, rank=rank, world_size=world_size)
        for number, batch in enumerate(found, start=first):
            self.is_wild = number in self.wild_batches
            yield batch

    def weights(self, batch):
        return self.inner.weights(batch)

    def losses(self, output, batch, model):
        losses = self.inner.losses(output, batch, model).losses
        if self.is_wild and not self.factor:
            overflow = partial(tiny_run.flows_back, change=lambda gradient: gradient * torch.inf)
            return Terms({name: overflow(value) for name, value in losses.items()})
        return Terms({name: value * (self.factor if self.is_wild else 1.0) for name, value in losses.items()})


def run_case(folder: Path, case: dict[str, Any], world: World) -> None:
    model, notes = Decoder(parse(type(tiny_run.SHAPE), vars(tiny_run.SHAPE) | case.get("shape", {}))), Notes()
    model.init_weights(0)
    mishap = NOTHING | case.get("mishap", {})
    objective: Any = NextToken(tiny_run.Rows())
    if mishap["kind"] in FACTORS and (mishap["kind"] != "overflow" or world.rank == mishap["rank"]):
        wild = range(mishap["step"], max(mishap["step"], mishap["last"]) + 1)
        objective = Wild(objective, wild, FACTORS[mishap["kind"]])
    found: dict[str, Any] = {"error": "", "kind": ""}
    watcher = Mishap(mishap["kind"], mishap["step"], mishap["rank"], world, model, mishap["stop"])
    try:
        result = tiny_run.run(
            folder / case["folder"],
            tiny_run.settings(**case["settings"]),
            objective=objective,
            model=model,
            world=world,
            parallel=parse(ParallelConfig, case.get("parallel", {})),
            techniques=tiny_run.watching(mishap=watcher),
            progress=notes,
        )
        found |= {"num_hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())}
        found |= {"bytes_sent": result.bytes_sent, "events": dict(result.summary_of("anomalies").get("num_events", {}))}
        found |= {"left_out": list(result.summary_of("loss_spikes").get("left_out", []))}
        path = folder / case["folder"] / f"{case['name']}-{world.rank}"
        save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, f"{path}.safetensors")
    except ModelwrightError as error:
        found |= {"error": str(error), "kind": type(error).__name__}
    found |= {"notes": notes.texts, "scales": watcher.scales, "skipped": watcher.skipped}
    (folder / case["folder"]).mkdir(exist_ok=True)  # what is refused at once makes none
    (folder / case["folder"] / f"{case['name']}-{world.rank}.json").write_text(json.dumps(found))


def run_cases(world: World, folder: Path, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        run_case(folder, case, world)
        world.barrier()
