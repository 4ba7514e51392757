"""What the processes of the federated tests run: clients that behave, and clients that do not."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import tiny_run

from modelwright.data.batch import TokenBatch
from modelwright.federated.aggregate import ClientUpdate, clipped
from modelwright.federated.client import FederatedClient
from modelwright.federated.config import FederatedConfig
from modelwright.federated.local_training import LocalTraining
from modelwright.objectives.next_token import NextToken

MOST_BYTES = 2**22


@dataclass(frozen=True)
class OwnRows:
    """Some rows of each batch of `tiny_run.Rows`, which differ in how many labels they have."""

    first: int
    last: int
    num_batches_per_epoch: int = 5

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        whole, own = tiny_run.Rows().batch(index), slice(self.first, self.last)
        return TokenBatch(
            input_ids_BT=whole.input_ids_BT[own],
            labels_BT=whole.labels_BT[own],
            positions_BT=whole.positions_BT[own],
            segments_BT=whole.segments_BT[own],
        )


def own_change(name: str, number: int, size: int) -> np.ndarray:
    """The update that a client with this name makes in a round, of about the same norm for all."""
    draw = np.random.default_rng([number, *name.encode()])
    return draw.normal(0.0, 0.1, size).astype(np.float32)


def run_client(port: int, name: str, key: bytes, config: FederatedConfig, behavior: str) -> None:
    """A client whose training is a function of its name and the round. behavior: from round 1 on; a client that is
    "unclipped" does not scale its updates down in any round.
    """

    def train(weights: np.ndarray, *, number: int, num_steps: int, proximal_mu: float) -> ClientUpdate:
        change, weight = own_change(name, number, len(weights)), 2.0
        if number == 0 or not behavior:
            return ClientUpdate(change, weight)
        match behavior:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "slow":
                time.sleep(600)
            case "nan":
                change[3] = np.nan
            case "huge" | "unclipped":
                change = change * np.float32(1000)
        return ClientUpdate(change, weight)

    with mock.patch("modelwright.federated.client.clipped", as_it_is if behavior == "unclipped" else clipped):
        client(port, name, key, config, train).run()


def as_it_is(update: ClientUpdate, most: float) -> ClientUpdate:
    """In place of `clipped`."""
    return update


def train_client(port: int, name: str, key: bytes, config: FederatedConfig, folder: Path, first_row: int) -> None:
    """A client that trains the tiny model on two rows of its own."""
    local = local_training(folder / name, OwnRows(first_row, first_row + 2))
    client(port, name, key, config, local.round).run()


def local_training(folder: Path, rows: OwnRows) -> LocalTraining:
    num_rows = rows.last - rows.first
    return LocalTraining(
        model=tiny_run.tiny_model(),
        source=rows,
        objective=NextToken,
        config=sgd_settings(batch_tokens=num_rows * tiny_run.LENGTH),
        folder=folder,
    )


def client(port: int, name: str, key: bytes, config: FederatedConfig, train) -> FederatedClient:
    return FederatedClient(
        name=name, key=key, host="127.0.0.1", port=port, config=config, train=train, most_bytes=MOST_BYTES,
        note=lambda text: None, patience_s=20.0,
    )  # fmt: skip


def sgd_settings(**changes):
    """Plain steps of SGD at a constant rate."""
    plain = {
        "optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "weight_decay": 0.0, "eval_every_steps": 0,
        "checkpoint_every_steps": 0, "schedule": {"kind": "constant", "warmup_fraction": 0.0},
    }  # fmt: skip
    return tiny_run.settings(**{**plain, **changes})
