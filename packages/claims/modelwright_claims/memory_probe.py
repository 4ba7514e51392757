"""Peak memory of training steps of THE loop, rank by rank, in separate processes.

Tokens are random: memory does not depend on their values. On a CPU the bytes are resident memory above the
memory that the process held before the model, with a heap that maps every larger tensor separately and gives it back
at once, so that the gaps of a heap that keeps memory (`ops.tensor_heap`) do not count; on a GPU they are the
allocator's. Neither depends on what else the machine does. Writing the last checkpoint does not count.
"""

import contextlib
import dataclasses
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from modelwright.core.artifacts import StageDir
from modelwright.core.config import dump, parse
from modelwright.core.progress import SilentProgress
from modelwright.core.resources import ResourceUse
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.ops.tensor_heap import SWITCH, give_back_memory
from modelwright.parallel.mesh import ParallelConfig, World, join_world
from modelwright.train import build
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.technique import StepInfo, observer
from modelwright_claims.launch import run_ranks

NUM_STEPS = 3
CONDITION = "resident above the start, without gaps of the heap"
"""Name of the condition that says how bytes are counted on a CPU."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ONE_COPY = ParallelConfig()


class _Measured(Exception):
    """Ends a run before its last checkpoint, which is not measured."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A training of some steps: a model on rows of `seq_len` tokens, each row one document; `count_flops` is slow."""

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    seq_len: int
    count_flops: bool = False
    num_steps: int = NUM_STEPS


def fp32_probe(
    model: ModelConfig, *, rows: int, parallel: ParallelConfig = _ONE_COPY, count_flops: bool = False, **settings: Any
) -> Probe:
    """Return a probe of FP32 training on rows of the model's whole context, without checkpoints.

    settings: of the `TrainConfig`, as in a configuration file.
    """
    shared = {
        "num_steps": NUM_STEPS,
        "precision": {"policy": "fp32"},
        "checkpoint_every_minutes": 0,
        "keep_best": False,
    }
    train = parse(TrainConfig, {**shared, "batch_tokens": rows * model.max_seq_len, **settings}, constants=True)
    return Probe(model=model, train=train, parallel=parallel, seq_len=model.max_seq_len, count_flops=count_flops)


def probe_model(
    *, model_dim: int, num_layers: int, vocab_size: int, seq_len: int, head_dim: int, tie_embeddings: bool = False
) -> ModelConfig:
    """Return a model with as many key/value heads as heads, and an FFN of 8/3 of its width."""
    return ModelConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        model_dim=model_dim,
        num_heads=model_dim // head_dim,
        num_kv_heads=model_dim // head_dim,
        head_dim=head_dim,
        ffn_dim=model_dim * 8 // 3 // 16 * 16,
        max_seq_len=seq_len,
        tie_embeddings=tie_embeddings,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A single rank's figures.

    peak_bytes: the most that the steps after the first took (from then on all states exist); states_bytes: held
    between two steps: weights and optimizer states; step_s: of the last step; flops: of one step, 0 if not counted.
    """

    rank: int
    peak_bytes: int
    states_bytes: int
    step_s: float
    flops: float


def measure(probe: Probe, *, num_ranks: int = 1, own_heap: bool = False) -> list[Measured]:
    """Each rank's figures, from processes of one thread each. Raises `ModelwrightError` with the output of a failure.

    own_heap: with the heap that training has, gaps and all.
    """
    return measure_all([probe], num_ranks=num_ranks, own_heap=own_heap)[0]


def measure_all(probes: Sequence[Probe], *, num_ranks: int = 1, own_heap: bool = False) -> list[list[Measured]]:
    """The probes one after the other in the same processes; `[probe][rank]`."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "probes.json"
        config.write_text(json.dumps([dump(probe) for probe in probes]), encoding="utf-8")
        outputs = run_ranks(
            __name__,
            [str(config)],
            num_ranks=num_ranks,
            environment={}
            if own_heap
            else {SWITCH: "0", "MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"},
        )
    by_rank = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [[Measured(**result) for result in ranks] for ranks in zip(*by_rank, strict=True)]


@dataclass(frozen=True)
class RandomRows:
    """Batches of random tokens, each row one document."""

    num_rows: int
    seq_len: int
    vocab_size: int
    num_batches_per_epoch: int = 1

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        shape = (self.num_rows // world_size, self.seq_len)
        draw = torch.Generator().manual_seed(index * world_size + rank)
        tokens = torch.randint(self.vocab_size, shape, generator=draw)
        labels = tokens.roll(-1, dims=1)
        labels[:, -1] = IGNORED
        positions = torch.arange(self.seq_len).repeat(shape[0], 1)
        segments = torch.zeros(shape, dtype=torch.int32)
        return TokenBatch(input_ids_BT=tokens, labels_BT=labels, positions_BT=positions, segments_BT=segments)


@dataclass
class Meter:
    """Reads memory at the end of every step, and ends the run after the last one."""

    device: torch.device
    num_steps: int
    use: ResourceUse = field(default_factory=ResourceUse)
    peak_bytes: int = 0
    states_bytes: int = 0
    step_s: float = 0.0

    def observe(self, info: StepInfo) -> None:
        self.step_s, self.states_bytes = info.step_time_s, _held(self.device)
        if info.step > 1:
            self.peak_bytes = max(self.peak_bytes, self._peak())
        if info.step == self.num_steps:
            raise _Measured
        self._start()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        self.use.__exit__(None, None, None)
        return self.use.peak_bytes

    def _start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self.use.__enter__()


def _run(probe: Probe, world: World, folder: Path) -> Measured:
    """Train as one rank. A small model first, so that libraries have made their own buffers."""
    warm = dataclasses.replace(probe.model, num_layers=probe.parallel.pipeline, vocab_size=64)
    _train(dataclasses.replace(probe, model=warm), world, Meter(world.device, probe.num_steps), folder / "warm")
    meter, flops = Meter(world.device, probe.num_steps), 0.0
    give_back_memory()  # pages that the heap has kept of the small model would hide as many of the model's own
    before = _held(world.device)
    _train(probe, world, meter, folder / "run")
    if probe.count_flops:
        with FlopCounterMode(display=False, custom_mapping=_FLOPS) as counter:
            _train(probe, world, Meter(world.device, probe.num_steps), folder / "counted")
        flops = counter.get_total_flops() / probe.num_steps
    return Measured(
        rank=world.rank,
        peak_bytes=meter.peak_bytes - before,
        states_bytes=meter.states_bytes - before,
        step_s=meter.step_s,
        flops=flops,
    )


def _held(device: torch.device) -> int:
    """Return the bytes that the process holds now."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def _train(probe: Probe, world: World, meter: Meter, folder: Path) -> None:
    rows = RandomRows(probe.train.batch_tokens // probe.seq_len, probe.seq_len, probe.model.vocab_size)
    model = Decoder(probe.model)
    model.init_weights(0)
    with contextlib.suppress(_Measured):
        build.train(
            TrainJob(
                model=model,
                objective=NextToken(rows),
                config=probe.train,
                num_steps=probe.num_steps + 1,
                stage=StageDir(folder),
                seed=0,
                name="probe",
                input_digest="probe",
                techniques=[observer("meter", meter.observe)],
                parallel=probe.parallel,
            ),
            world,
            SilentProgress(),
        )


def _attention_flops(q_shape: Any, k_shape: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Two products over half of the square: rows of one document, causal."""
    rows, length, heads, head_dim = q_shape
    return 2 * rows * heads * head_dim * length * (length + 1)


def _attention_backward_flops(grad_shape: Any, q_shape: Any, k_shape: Any, *rest: Any, **more: Any) -> int:
    """Five products, one of them computed again."""
    return _attention_flops(q_shape, k_shape) * 5 // 2


def _in_place_product_flops(total_shape: Any, left_shape: Any, right_shape: Any, *rest: Any, **more: Any) -> int:
    """The gradient of the head's weight, added up chunk by chunk; PyTorch counts `addmm` only."""
    return 2 * left_shape[0] * left_shape[1] * right_shape[1]


_FLOPS = {
    torch.ops.aten.addmm_: _in_place_product_flops,
    torch.ops.modelwright.packed_attention: _attention_flops,
    torch.ops.modelwright.packed_attention_backward: _attention_backward_flops,
}


def main() -> None:
    path = Path(sys.argv[1])
    probes = [parse(Probe, data) for data in json.loads(path.read_text(encoding="utf-8"))]
    torch.set_num_threads(1)
    with join_world() as world:
        result = [_run(probe, world, path.parent / str(number)) for number, probe in enumerate(probes)]
    print(json.dumps([dataclasses.asdict(one) for one in result]), flush=True)


if __name__ == "__main__":
    main()
