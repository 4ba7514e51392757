"""Training runs of whole stacks of techniques, each in processes of its own: seconds of all steps and held-out loss.

An arm names what it uses: the plain loop (`plain_training`) or THE loop, padded or packed rows, how many processes on
how many hosts, and settings of the run. Hosts are network namespaces joined by links of 100 Mbit/s, one process of one
thread each; on one host an arm has all its cores, as threads of one process or as processes. Runs of a seed share
initial weights. Knows no claim.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump, merge, parse
from modelwright.core.errors import ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright.core.resources import num_usable_cores
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, join_world, lay_out, single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.evaluation import heldout_losses
from modelwright.train.runner import WholeModel
from modelwright.train.technique import StepInfo, Technique
from modelwright_claims.claim import Setting
from modelwright_claims.netns import Network, free_port, star
from modelwright_claims.plain_training import train_plainly
from modelwright_claims.workbench import Mode, Size, packed_rows, prepare_text, real_token_share

MBIT = 100.0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One stack. settings: of the `TrainConfig`, as plain data; processes: on each host, which share its cores."""

    plain: bool = False
    mode: Mode = "best_fit"
    hosts: int = 1
    processes: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """An arm at a size (steps and rate are the arm's own) from one seed's weights."""

    arm: Arm
    size: Size
    seed: int


def train_once(folder: Path, job: Job, world: World, stage: StageDir) -> dict[str, float]:
    """This process's part of a run; stage: of all of them."""
    setting = Setting(folder=folder, quick=False, progress=SilentProgress())
    text = prepare_text(setting)
    arm, size = job.arm, job.size
    model = Decoder(size.model_config(text.vocab_size))
    model.init_weights(derive_seed(job.seed, "weights"))
    rows = packed_rows(setting, text, seq_len=size.seq_len, mode=arm.mode, split="train")
    heldout = list(packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="heldout").batches(32))
    objective = Pretrain(PackedLoader(rows, batch_rows=size.batch_rows, seed=derive_seed(job.seed, "order")))
    config = parse(TrainConfig, merge(dump(size.train_config(learning_rate=size.learning_rate)), arm.settings))
    if arm.plain:
        batches = objective.batches(model, first=0, rank=world.rank, world_size=world.size)
        seconds = train_plainly(model, batches, config, num_steps=size.num_steps, world=world)
        runner = WholeModel(model, lay_out(single(), ParallelConfig()).context, scatters_each=False)
        alone = lay_out(single(), ParallelConfig())
        loss = heldout_losses(runner, objective, heldout, alone, alive=lambda: None)["loss"]
        return {"seconds": seconds, "heldout_loss": loss}
    watch = Stopwatch()
    result = train(
        model, objective, config, num_steps=size.num_steps, world=world, stage=stage,
        seed=job.seed, name="arm", input_digest="arm", progress=SilentProgress(), heldout=heldout,
        parallel=ParallelConfig(share_memory=arm.hosts == 1),
        techniques=[Technique(name="stopwatch", on_step_end=watch.observe)],
    )  # fmt: skip
    return {"seconds": watch.seconds, "heldout_loss": result.heldout_loss}


@dataclass
class Stopwatch:
    """Seconds from the start of the first step to the end of the last, what lies between steps included."""

    every: int = 1
    started: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def observe(self, info: StepInfo) -> None:
        self.ended = time.perf_counter()
        self.started = self.started or self.ended - info.step_time_s


def work(folder: Path, job: Job, out: Path) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with join_world(torch.device("cpu")) as world:
        found = train_once(folder, job, world, StageDir(out.with_suffix("")))
        if world.is_first:
            write_atomic(out, json.dumps(found))


def rows_of_batch(setting: Setting, size: Size, mode: Mode) -> int:
    """Rows that hold as many real tokens as a packed batch, in multiples of two."""
    if mode == "best_fit":
        return size.batch_rows
    text = prepare_text(setting)
    packed, padded = (real_token_share(setting, text, size, mode=one) for one in ("best_fit", "pad"))
    return 2 * max(1, round(size.batch_rows * packed / padded / 2))


def make_rows(setting: Setting, size: Size) -> None:
    """All text that arms are trained and judged on, so that runs side by side need not make it."""
    text = prepare_text(setting)
    for mode in get_args(Mode):
        packed_rows(setting, text, seq_len=size.seq_len, mode=mode, split="train")
    packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="heldout")


def measure(
    setting: Setting, arm: Arm, size: Size, *, seed: int, mbit: float = MBIT, threads: int = 0
) -> dict[str, float]:
    """One run, in processes of its own.

    mbit: of the links between hosts, 0 for no limit and no networks; threads: of each process, 0 for all cores of one
    host and one on each of several. Raises `ModelwrightError` when a process fails.
    """
    job = Job(arm=arm, size=replace(size, batch_rows=rows_of_batch(setting, size, arm.mode)), seed=seed)
    num_ranks = arm.hosts * arm.processes
    threads = threads or (1 if arm.hosts > 1 else max(1, num_usable_cores() // arm.processes))
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(arm.processes), "OMP_NUM_THREADS": str(threads)}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=setting.folder)))
        out = folder / "found.json"
        command = [sys.executable, "-m", "modelwright_claims.efficiency_probe"]
        command += [str(setting.folder), json.dumps(dump(job)), str(out)]
        if arm.hosts == 1 or not mbit:
            port = str(_local_port())
            local = {**os.environ, **shared, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks = [
                subprocess.Popen(
                    command, env={**local, "RANK": str(rank), "LOCAL_RANK": str(rank % arm.processes)}, stderr=-1
                )
                for rank in range(num_ranks)
            ]
        else:
            ranks = _on_hosts(held.enter_context(Network(star(arm.hosts, mbit=mbit))), command, shared)
        errors = [rank.communicate()[1] for rank in ranks]
        for rank, text in zip(ranks, errors, strict=True):
            if rank.returncode:
                raise ModelwrightError(f"efficiency: a process failed\n{text.decode()[-2000:]}")
        return json.loads(out.read_text())


def _on_hosts(net: Network, command: list[str], shared: Mapping[str, str]) -> list[subprocess.Popen[Any]]:
    """One process on each host."""
    port = free_port(net, net.hosts[0])
    return [
        net.popen(
            host,
            command,
            env={**net.torch_environment(host, net.hosts[0], port), **shared, "RANK": str(rank), "LOCAL_RANK": "0"},
            stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(net.hosts)
    ]


def _local_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    folder, job, out = sys.argv[1:]
    work(Path(folder), parse(Job, json.loads(job)), Path(out))


if __name__ == "__main__":
    main()
