"""Runs of a small model as one rank, with the bytes of every step: traffic_run.py FOLDER CASES.json [NAMESPACE].

The namespace is a network's, to move to first. Each case has a name, settings and a layout; each rank leaves
FOLDER/<name>-<rank>.json: the metric `bytes_sent`, what the namespace's interfaces have sent, and the loss.
"""

import ctypes
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import tiny_run as tiny

from modelwright.core.config import parse
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, join_world
from modelwright.train.technique import StepInfo, Technique
from modelwright_claims.links_probe import sent_bytes

SHAPE = replace(tiny.SHAPE, num_layers=4, model_dim=128, ffn_dim=256, head_dim=32)
NUM_STEPS = 7
CLONE_NEWNET = 0x40000000
ONCE = {"num_steps": NUM_STEPS, "eval_every_steps": 0, "checkpoint_every_steps": 0, "learning_rate": 3e-3}


@dataclass
class Meter:
    """Controller that writes down every step."""

    every: int = 1
    metric: list[int | None] = field(default_factory=list)
    interface: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def observe(self, info: StepInfo) -> None:
        self.metric.append(info.bytes_sent)
        self.interface.append(sent_bytes())
        self.losses.append(info.loss)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, to a network namespace."""
    inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(inside, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(inside)


def run_case(folder: Path, case: dict[str, Any], world: World) -> None:
    model, meter = Decoder(SHAPE), Meter()
    model.init_weights(0)
    tiny.run(
        folder / case["name"],
        tiny.settings(**{**ONCE, **case.get("settings", {})}),
        model=model,
        world=world,
        parallel=parse(ParallelConfig, case["layout"]),
        techniques=[Technique(name="meter", on_step_end=meter.observe)],
        heldout=[],
    )
    found = vars(meter)
    if world.is_first:
        found = found | {"recorded": column(read_records(folder / case["name"] / "metrics.jsonl"), "bytes_sent")}
    (folder / f"{case['name']}-{world.rank}.json").write_text(json.dumps(found))


def main() -> None:
    torch.set_num_threads(1)
    folder, cases, *namespace = sys.argv[1:]
    if namespace:
        enter(namespace[0])
    with join_world(torch.device("cpu")) as world:
        for case in json.loads(Path(cases).read_text()):
            run_case(Path(folder), case, world)


if __name__ == "__main__":
    main()
