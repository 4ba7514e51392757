"""A tiny run as one rank of a pipeline, with a folder for each case."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tiny_run as tiny
import torch
from safetensors.torch import save_file

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World

STEPS = 3


@dataclass(frozen=True)
class Case:
    """schedule, stages_per_rank, num_microbatches, tied, dtype, pipeline, data, zero_stage, precision,
    tensor, context, whether activations are computed again,
    layers per stage after step 2, as 3+1: the run goes on from the same case's checkpoint with an even split,
    rows of the batches, as 8+3, in turn."""

    schedule: str = "1f1b"
    stages_per_rank: int = 1
    num_microbatches: int = 4
    tied: bool = False
    exact: bool = True
    pipeline: int = 2
    data: int = 1
    zero_stage: int = 0
    precision: str = "fp32"
    tensor: int = 1
    context: int = 1
    recompute: bool = False
    layers: str = ""
    rows: str = "8"

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.tensor * self.context

    @property
    def num_layers(self) -> int:
        """Few, to be fast: two for a stage unless there are many stages."""
        return max(4, self.pipeline * self.stages_per_rank)

    @property
    def single(self) -> str:
        """The folder of the run of one process that this one has to equal."""
        return f"one-{self.tied}-{self.exact}-{self.num_layers}-{self.rows}"


@dataclass(frozen=True)
class RaggedRows:
    """Batches of so many rows, in turn; the last copy gets fewer where they do not divide."""

    sizes: tuple[int, ...]
    num_batches_per_epoch: int = 5

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        num_rows = self.sizes[index % len(self.sizes)]
        share = -(-num_rows // world_size)
        mine = torch.arange(rank * share, min(num_rows, (rank + 1) * share))
        return tiny.Rows(num_rows=num_rows).batch(index).take(mine)


def tiny_model(*, tied: bool, num_layers: int) -> Decoder:
    shape = replace(
        tiny.SHAPE, num_layers=num_layers, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, qk_norm=True
    )
    model = Decoder(replace(shape, tie_embeddings=tied))
    model.init_weights(3)
    return model


def run_case(case: Case, folder: Path, world=None) -> None:
    """Train and leave metrics.jsonl and, of every rank, the whole final weights."""
    model = tiny_model(tied=case.tied, num_layers=case.num_layers)
    rows = RaggedRows(tuple(map(int, case.rows.split("+"))))
    objective = NextToken(rows)
    if case.exact:
        model, objective = model.double(), tiny.Float64Objective(rows)
    config = tiny.settings(
        num_steps=STEPS,
        gradient_accumulation_steps=case.num_microbatches if world else 1,
        eval_every_steps=2,
        precision={"policy": case.precision},
        activation_checkpointing={"mode": "full", "layers_per_segment": 1} if world and case.recompute else {},
        keep_best=False,
        checkpoint_every_steps=2,
    )
    more = {}
    if world and case.layers:
        before = folder.with_name(replace(case, layers="").name)
        if world.is_first:
            shutil.copytree(before / "checkpoints" / "step-00000002", folder / "checkpoints" / "step-00000002")
        world.barrier()
    if world:
        more["parallel"] = ParallelConfig(
            pipeline=case.pipeline,
            data=case.data,
            schedule=case.schedule,  # type: ignore[arg-type]
            stages_per_rank=case.stages_per_rank,
            zero_stage=case.zero_stage,  # type: ignore[arg-type]
            tensor=case.tensor,
            context=case.context,
            layers_per_stage=tuple(map(int, case.layers.split("+"))) if case.layers else (),
        )
    tiny.run(folder, config, objective=objective, model=model, world=world, **more)
    rank = world.rank if world else 0
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / f"rank{rank}.safetensors")


def run_cases(world: World, folder: Path, cases: Sequence[Case]) -> None:
    for case in cases:
        run_case(case, folder / case.name, world)
