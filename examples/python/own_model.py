# Trains a model, batches and an objective of your own in the training loop, without recipe, corpus or run.
# Run it anywhere: python own_model.py; under `torchrun --nproc_per_node 2` the same job is trained by two processes.
# Checkpoints are in the folder "own-model": an interrupted run resumes with the same bits.
from pathlib import Path

import torch

import modelwright as mw
from modelwright.core.artifacts import StageDir
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import join_world
from modelwright.train.config import TrainConfig
from modelwright.train.precision.policy import PrecisionConfig


class Counting:
    """Rows of consecutive numbers: the next token is the last one plus 1. Batch `index` is a function of `index`."""

    num_batches_per_epoch = 8

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        positions_BT = torch.arange(16).repeat(4 // world_size, 1)
        first_B1 = (4 * index + rank * len(positions_BT) + torch.arange(len(positions_BT)))[:, None]
        ids_BT = (positions_BT + first_B1) % 32
        segments_BT = torch.zeros_like(ids_BT, dtype=torch.int32)
        return TokenBatch(
            input_ids_BT=ids_BT, labels_BT=(ids_BT + 1) % 32, positions_BT=positions_BT, segments_BT=segments_BT
        )


def main() -> None:
    shape = ModelConfig(
        vocab_size=32, max_seq_len=16, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=2, ffn_dim=64, head_dim=16
    )
    model = Decoder(shape)
    model.init_weights(0)
    config = TrainConfig(num_steps=40, batch_tokens=64, learning_rate=1e-2, precision=PrecisionConfig(policy="fp32"))
    with join_world() as world:
        stage = StageDir(Path("own-model"))
        job = mw.TrainJob(model=model, objective=NextToken(Counting()), config=config, stage=stage, num_steps=40)
        result = mw.train_model(job, world)
    print(f"loss {result.loss:.3f} after {result.num_steps} steps")


if __name__ == "__main__":
    main()
