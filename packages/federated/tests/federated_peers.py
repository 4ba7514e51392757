"""Clients of tests, and a grid that carries Flower's messages to them within this process."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiny_run
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from modelwright.core.config import parse
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright_federated.client import FederatedClient, client_app
from modelwright_federated.config import FederatedConfig, FederatedLoraConfig
from modelwright_federated.local_training import ClientUpdate, LocalTraining
from modelwright_federated.server import FederatedServer
from modelwright_federated.weights import attach_federated

SIZE = 300


def settings(**changes) -> FederatedConfig:
    base = {"num_rounds": 2, "local_steps": 1, "min_clients": 2, "round_timeout_s": 60.0}
    return parse(FederatedConfig, base | changes)


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


def tiny_model(config: FederatedLoraConfig) -> Decoder:
    model = tiny_run.tiny_model()
    attach_federated(model, config, seed=5)
    return model


def local_training(folder: Path, rows: OwnRows, **changes) -> LocalTraining:
    """A client of the tiny model. changes: of the settings, besides the rows' number of tokens."""
    num_rows = rows.last - rows.first
    sgd = {"optimizer": "sgd", "learning_rate": 0.5, "batch_tokens": num_rows * tiny_run.LENGTH}
    config = settings(**(sgd | changes))
    return LocalTraining(
        model=tiny_model(config.lora),
        source=rows,
        objective=NextToken,
        config=config,
        training=tiny_run.settings(),
        folder=folder,
    )


def own_change(name: str, number: int, size: int = SIZE) -> np.ndarray:
    """The update that a client with this name makes in a round, of about the same norm for all."""
    draw = np.random.default_rng([number, *name.encode()])
    return draw.normal(0.0, 0.1, size).astype(np.float32)


@dataclass
class MadeUp:
    """In place of `LocalTraining`: an update that follows from the name and the round, changed by `alter`."""

    name: str
    alter: Callable[[np.ndarray, int], np.ndarray] = lambda change, number: change
    labels: float = 2.0
    proximal: list[float] = field(default_factory=list)

    def round(self, weights: np.ndarray, *, number: int, proximal_mu: float) -> ClientUpdate:
        self.proximal.append(proximal_mu)
        change = self.alter(own_change(self.name, number, len(weights)), number)
        return ClientUpdate(change, self.labels, loss=3.0 - number)


class MemoryGrid(Grid):
    """Hands messages to ClientApps in this process. lost: whether a client is gone when the server sends it a message,
    from the client's name, the round (from 0) and the number of the message in this round.
    """

    def __init__(
        self,
        config: FederatedConfig,
        trainings: Iterable[MadeUp],
        lost: Callable[[str, int, int], bool] = lambda name, number, message: False,
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # which Flower's processes get first
        self.notes: list[str] = []
        self.replies: list[Message] = []
        self.lost, self.config = lost, config
        self.names = {node: one.name for node, one in enumerate(trainings, start=1)}
        self.apps = {
            node: client_app(self.client_of(config, one), self.notes.append)
            for node, one in enumerate(trainings, start=1)
        }
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
            for node in self.apps
        }
        self.sent = dict.fromkeys(self.apps, 0)

    @staticmethod
    def client_of(config: FederatedConfig, training: MadeUp) -> Callable[[Context], FederatedClient]:
        client = FederatedClient(name=training.name, config=config, training=lambda: training)  # pyright: ignore
        return lambda context: client

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            per_round = 4 if self.config.secure_aggregation.enabled else 1
            number, of_round = divmod(self.sent[node], per_round)
            self.sent[node] += 1
            if not self.lost(self.names[node], number, of_round):
                replies.append(self.apps[node](deepcopy(message), self.contexts[node]))  # as over a network
        self.replies += replies
        return replies

    def other_way(self, *arguments, **more):
        """What else a Grid has: strategies use `send_and_receive` alone."""
        raise AssertionError("a strategy talked to its clients in another way")

    run = property(other_way)
    set_run = create_message = push_messages = pull_messages = other_way


def server(grid: Grid, config: FederatedConfig, folder: Path, weights: np.ndarray | None = None, **more):
    """A server whose notes are `server.notes`."""
    notes: list[str] = []
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    made = FederatedServer(
        config=config,
        grid=grid,
        context=context,
        weights=np.zeros(SIZE, np.float32) if weights is None else weights,
        folder=folder,
        note=notes.append,
        **more,
    )
    made.notes = notes  # pyright: ignore[reportAttributeAccessIssue]
    return made


def mean_of(names: Iterable[str], number: int) -> np.ndarray:
    return np.mean([own_change(name, number).astype(np.float64) for name in names], axis=0)


def trainings(**alter: Callable[[np.ndarray, int], np.ndarray]) -> list[MadeUp]:
    """Four clients, some of which do something to their updates."""
    return [MadeUp(name, alter[name]) if name in alter else MadeUp(name) for name in ("ann", "ben", "cem", "dia")]


def from_round_1(change_in: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda change, number: change_in(change) if number else change
