"""Runs whose weights FSDP gathers, as one rank: gather_run.py FOLDER CASES.json.

Each case has a name, settings and a layout. Each rank leaves FOLDER/<name>-<rank>.json, with the losses, the bytes sent
in the last step and the formats of what was gathered in it, and its last weights beside that.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import tiny_run as tiny

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.parallel import shard
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, join_world
from modelwright.train import parallelize as passes
from modelwright.train.technique import StepInfo, Technique

SHAPE = replace(tiny.SHAPE, num_layers=4, model_dim=64, ffn_dim=128, head_dim=16)
ONCE = {"num_steps": 4, "num_microbatches": 2, "eval_every_steps": 2, "checkpoint_every_steps": 0, "keep_best": False}


@dataclass
class Seen:
    """Controller that keeps what the run sent and lost."""

    every: int = 1
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def observe(self, info: StepInfo) -> None:
        assert info.bytes_sent is not None
        self.losses.append(info.loss)
        self.sent.append(info.bytes_sent)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def formats_when_gathered(model: Decoder) -> dict[str, str]:
    """Return the dtype of every parameter after `unshard`, by name."""
    modules = shard.sharded_modules(model)
    for module in modules:
        module.unshard()
    found = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in model.named_parameters()}
    for module in modules:
        module.reshard()
    return found


def run_case(folder: Path, case: dict[str, Any], world: World) -> None:
    model, seen = Decoder(SHAPE), Seen()
    model.init_weights(0)
    parts: list[Decoder] = []
    shard_states = shard.shard_states

    def remember(part: Decoder, *arguments: Any) -> Decoder:
        parts.append(shard_states(part, *arguments))
        return parts[-1]

    passes.shard_states = remember
    tiny.run(
        folder / case["name"],
        tiny.settings(**{**ONCE, **case["settings"]}),
        model=model,
        world=world,
        parallel=parse(ParallelConfig, case["layout"]),
        techniques=[Technique(name="seen", on_step_end=seen.observe)],
    )
    passes.shard_states = shard_states
    found = {"losses": seen.losses, "sent": seen.sent[-1] - seen.sent[-2], "formats": _all_formats(parts)}
    (folder / f"{case['name']}-{world.rank}.json").write_text(json.dumps(found))
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / f"{case['name']}-{world.rank}.safetensors")


def _all_formats(parts: Sequence[Decoder]) -> dict[str, str]:
    return {name: format_ for part in parts for name, format_ in formats_when_gathered(part).items()}


def main() -> None:
    torch.set_num_threads(1)
    folder, cases = map(Path, sys.argv[1:])
    with join_world(torch.device("cpu")) as world:
        for case in json.loads(cases.read_text()):
            run_case(folder, case, world)


if __name__ == "__main__":
    main()
