"""One rank of a pipeline whose steps are timed: `python -m modelwright_claims.pipeline_probe FOLDER`, one thread each.

Reads FOLDER/probe.json, writes FOLDER/rank<r>.json: for every case and repeat the step's start and end by the clock
that the processes of a machine share, and all spans. Gradients are computed and dropped: nothing is trained.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.core.config import parse
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, build_mesh, join_world
from modelwright.parallel.pipeline.balance import split_layers
from modelwright.parallel.pipeline.runner import Pipeline
from modelwright_claims.layer_times import agree, measure_layer_times
from modelwright_claims.memory_probe import RandomRows
from modelwright_claims.workbench import Size


@dataclass(frozen=True, kw_only=True)
class ProbeSize:
    """The model and the batch, which every number of microbatches shares out."""

    model: Size
    vocab_size: int
    num_repeats: int

    def batch(self) -> TokenBatch:
        """Full rows of one document each: every microbatch costs the same."""
        return RandomRows(self.model.batch_rows, self.model.seq_len, self.vocab_size).batch(0)


def measure_case(case: dict[str, Any], size: ProbeSize, model: Decoder, world: World) -> list[dict[str, Any]]:
    """Every timed step of one schedule and number of microbatches; the first step is not counted."""
    config = parse(ParallelConfig, case["layout"])
    mesh = build_mesh(world, config)
    pipeline = Pipeline(model, config, mesh, passes=lambda part: part)
    batch = size.batch()
    parts = batch.split(case["gradient_accumulation_steps"])

    def loss_of(output_BTD: Tensor, part: TokenBatch) -> Tensor:
        loss = pipeline.model.cross_entropy(output_BTD, part.labels_BT, chunk_tokens=512)
        return loss / batch.num_targets

    steps = []
    for _ in range(1 + size.num_repeats):
        world.barrier()
        start = time.perf_counter()
        pipeline.train(parts, loss_of)
        steps.append(
            {"start": start, "end": time.perf_counter(), "spans": list(map(asdict, pipeline.timeline.spans()))}
        )
        pipeline.model.zero_grad(set_to_none=True)
    return steps[1:]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plan = json.loads((folder / "probe.json").read_text())
    size = parse(ProbeSize, plan["size"])
    with join_world(torch.device("cpu")) as world:
        model = Decoder(size.model.model_config(size.vocab_size))
        model.init_weights(0)
        costs = agree(measure_layer_times(model, size.batch().split(size.model.batch_rows)[0]), world)
        steps = {}
        for case in plan["cases"]:
            num_stages = case["layout"]["pipeline"] * case["layout"]["stages_per_rank"]
            case["layout"]["layers_per_stage"] = list(split_layers(costs, num_stages))
            steps[case["name"]] = measure_case(case, size, model, world)
        (folder / f"rank{world.rank}.json").write_text(json.dumps({"steps": steps, "costs": asdict(costs)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
