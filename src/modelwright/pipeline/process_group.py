"""Process group of a run, with timeouts that suit a pipeline.

While rank 0 prepares data the others wait at a barrier, perhaps for hours. Training collectives keep their short
timeout, so that a hang is noticed there; hence a second process group that only waits. Rank numbers and the layout are
settled here, before any group is built.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modelwright.core.artifacts import ArtifactError, RunDir
from modelwright.core.config import ConfigError, ModelwrightError, prefix_errors
from modelwright.core.progress import Progress
from modelwright.ops import cpu_kernels
from modelwright.ops.cpu_kernels import KERNELS
from modelwright.parallel.control_plane import Heartbeat
from modelwright.parallel.elastic import join_as_fits
from modelwright.parallel.mesh import ParallelConfig, World, join_world
from modelwright.parallel.topology.links import (
    DEFAULT_TRAFFIC,
    LinksConfig,
    Placement,
    find_places,
    take_places,
)
from modelwright.pipeline.estimate.layout import expected_traffic, planned
from modelwright.pipeline.resolve import check_device, resolve_inputs, resolved_device
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.pack import PACK
from modelwright.train.config import TrainConfig

PATIENCE = timedelta(days=7)
_LEFT = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Socket is not connected",
    "Connection refused",
)  # fmt: skip
"""Messages of gloo, NCCL and the store in a process whose peer has exited."""


class PeerLost(ModelwrightError):
    """Raised if another process of the run has ended; its own error is reported elsewhere."""

    exit_code = 3


@dataclass(frozen=True)
class RunGroup:
    """`world` for training, laid out as `layout` describes; `barrier` waits indefinitely; `placement`: the new order of
    the ranks, None if they were not renumbered.
    """

    world: World
    layout: ParallelConfig
    waiting_group: Any = None
    placement: Placement | None = None

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def barrier(self) -> None:
        """Waits until all processes have arrived. Raises `PeerLost` if one of them has exited."""
        if self.size == 1:
            return
        try:
            dist.barrier(group=self.waiting_group)
        except RuntimeError as error:
            raise PeerLost("another process of this run has exited; its own message gives the reason") from error


def as_lost_peer(error: RuntimeError) -> RuntimeError | PeerLost:
    """Returns `PeerLost` for a collective that failed because another process has left, any other error unchanged."""
    text = str(error)
    if isinstance(error, dist.DistNetworkError) or any(words in text for words in _LEFT):
        reason = text.strip().splitlines()[0][:200]
        return PeerLost(f"another process of this run has ended or cannot be reached ({reason}); its message says why")
    return error


@contextmanager
def join_ranks(config: RunConfig, *, links: Path, num_rows: int = 0, host: str = "") -> Iterator[RunGroup | None]:
    """Joins all processes that were started, or this one alone; yields None for a process that the layout cannot use.

    links: cache file of measured links. num_rows: if above 0 (`shared_rows`), the layout is fitted to the processes
    that exist, and one that is left over waits at the end of the context. host: this process's host, "" for its network
    name.
    """
    device = torch.device("cpu")
    if (kind := resolved_device(config.hardware.device)) != "cpu":
        check_device(kind)
        num_cards, num_here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_here > num_cards:
            raise ConfigError(
                f"--nproc: {num_here} processes need one GPU each, and this machine has {num_cards}; start fewer, or "
                "choose hardware.device cpu"
            )
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    with ExitStack() as held:
        if num_rows:
            joined = held.enter_context(join_as_fits(config.parallel, num_rows=num_rows, device=device))
        else:
            joined = held.enter_context(join_world(device)), config.parallel
        if joined is None:
            yield None
            return
        world, layout = joined
        placement = None
        if layout.reorder_ranks and world.size > 1:
            with prefix_errors("parallel"):
                axes = layout.axes(world.size)
            # The traffic of the first training along each axis, before its data exists.
            traffic = DEFAULT_TRAFFIC
            if config.trainings:
                known = resolve_inputs(config)
                with suppress(ConfigError):  # the check of the whole request reports the error
                    job, placed = planned(known, known.first_training, layout, world.size)
                    traffic = DEFAULT_TRAFFIC | expected_traffic(job, placed)
            placement = find_places(world, axes, LinksConfig(cache=str(links)), traffic, host=host)
            world = take_places(world, placement.order)
        # A group of its own: with that timeout, a collective of training would hang for days unnoticed.
        waiting = dist.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None
        with Heartbeat(world, lost_after_s=layout.heartbeat_timeout_s):
            yield RunGroup(world, layout, waiting, placement)


def shared_rows(config: RunConfig) -> int:
    """Returns the number that the replicas of the model must divide: rows, or groups of rows, of a microbatch over all
    replicas, in every training of the run.
    """
    divisor = 0
    for stage in config.trainings:
        training: TrainConfig = config.section(stage)
        num_groups = training.batch_rows(config.section(PACK).seq_len * stage.trained_rows)
        divisor = math.gcd(divisor, num_groups // training.gradient_accumulation_steps)
    return divisor or 1


def use_threads(num_threads: int) -> int:
    """Divides `num_threads` among the processes of this machine and returns this process's share (at least 1)."""
    share = max(1, num_threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(share)
    return share


@contextmanager
def kernels_of_run(run: RunDir, world: World, progress: Progress) -> Iterator[Mapping[str, Any]]:
    """Makes all ranks, and the processes that they start, use the kernels of the first rank within the block. Yields
    `{"instruction_set", "used"}` of the first rank, for run.json.
    """
    choices = world.gather_json(_choice(run, progress))
    choice = choices[0]
    if others := {other["instruction_set"] for other in choices} - {choice["instruction_set"]}:
        names = ", ".join(sorted(_shown(name) for name in others))
        progress.note(f"kernels: ranks compute with {_shown(choice['instruction_set'])} and {names}")
    # As environment variables, which the processes that a rank starts inherit.
    variables = cpu_kernels.as_setting(choice["used"])
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield choice
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _choice(run: RunDir, progress: Progress) -> dict[str, Any]:
    """Returns the kernels that the run used last, on the same instruction set; else the faster ones here. The user's
    own setting wins.
    """
    now = {"instruction_set": cpu_kernels.instruction_set(), "used": sorted(cpu_kernels.used())}
    try:
        invocations = run.read_info()["invocations"]
    except ArtifactError:
        invocations = []  # a new run
    last: dict[str, Any] | None = next((one["kernels"] for one in reversed(invocations) if "kernels" in one), None)
    if last is None or last == now:
        return now
    if last["instruction_set"] != now["instruction_set"]:
        before, here = _shown(last["instruction_set"]), _shown(now["instruction_set"])
        progress.note(f"kernels: the run began with {before} and continues with {here}; last bits of results differ")
        return now
    if cpu_kernels.SWITCH in os.environ:
        progress.note(f"kernels: {cpu_kernels.SWITCH} differs from what the run used; last bits of results differ")
        return now
    return {**now, "used": [name for name in last["used"] if name in KERNELS]}


def _shown(instruction_set: str) -> str:
    return instruction_set or "no kernels"
