"""The tiny run as one of several processes on shared weights; a script for `test_hogwild_loop`.

hogwild_run.py FOLDER NUM_STEPS DIE_AT: the last rank dies by SIGKILL when it is given batch DIE_AT (-1: never) or a
later one and there is a checkpoint. Rank r writes its last weights and the numbers of its batches to FOLDER/rank<r>.*.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import tiny_run
import torch
from safetensors.torch import save_file

from modelwright.core.errors import ModelwrightError
from modelwright.data.batch import TokenBatch
from modelwright.objectives.pretrain import Pretrain
from modelwright.parallel.mesh import World, join_world
from modelwright.train.config import TrainConfig

LOST = 3


@dataclass(frozen=True)
class Deadly(tiny_run.Rows):
    die_at: int = -1
    checkpoints: Path = Path()

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        if 0 <= self.die_at <= index and list(self.checkpoints.glob("step-*[0-9]")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(index, rank=rank, world_size=world_size)


def config(num_steps: int) -> TrainConfig:
    return tiny_run.settings(
        num_steps=num_steps, eval_every_steps=20, checkpoint_every_steps=20, asynchronous={"mode": "hogwild"}
    )


def train(world: World, folder: Path, num_steps: int, die_at: int) -> None:
    die_at = die_at if world.rank == world.size - 1 else -1
    model, rows = tiny_run.tiny_model(), Deadly(die_at=die_at, checkpoints=folder / "checkpoints")
    tiny_run.run(folder, config(num_steps), objective=Pretrain(rows), model=model, world=world)
    save_file(model.state_dict(), folder / f"rank{world.rank}.safetensors")
    (folder / f"rank{world.rank}.json").write_text(json.dumps(rows.calls))


def main() -> None:
    torch.set_num_threads(1)
    with join_world(torch.device("cpu")) as world:
        try:
            train(world, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
        except ModelwrightError as error:
            print(error, flush=True)
            os._exit(LOST)  # the process group cannot be taken down with a member gone


if __name__ == "__main__":
    main()
