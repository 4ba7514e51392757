"""Federated training in a Flower federation: a ClientApp around a client's local training, and a strategy that bounds
what clients send. Importing this module needs the extra `flower`; our own server and transport are in server.py.

Weights travel as one array in the form of `weight_vector`. A client replies with its trained weights and the number of
its labels, as Flower's own strategies want it, so that those work, too.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modelwright.core.config import digest
from modelwright.core.errors import ConfigError, ModelwrightError
from modelwright.core.event_log import EventLog
from modelwright.federated.aggregate import ClientUpdate, Combine, clipped, mean_of, mean_update, usable_updates
from modelwright.federated.checkpoint import RoundState, read_round, write_round
from modelwright.federated.client import Trains
from modelwright.federated.config import FederatedConfig
from modelwright.federated.hub import Note
from modelwright.federated.server import LOG_FILE, MOST_FAILED_ROUNDS, RoundResult

TELEMETRY = "FLWR_TELEMETRY_ENABLED"
INSTALLS = "--allow-runtime-dependency-installation"
"""Flower gives this option to the process of an app for which it has installed packages."""
if TELEMETRY not in os.environ and "flwr" in sys.modules:  # Flower reads it once, when it is imported
    raise ConfigError(
        f"{TELEMETRY}: is not set, so that Flower reports what runs to its makers; "
        f"export {TELEMETRY}=0 where you start Flower, or 1 if you want that"
    )
if INSTALLS in sys.argv:
    raise ConfigError(
        f"{INSTALLS}: Flower installs the packages that an app names, on this machine; export "
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 where you start flower-superlink, and start flower-supernode "
        "without this option"
    )
os.environ.setdefault(TELEMETRY, "0")

try:
    from flwr.app import (  # pyright: ignore[reportMissingImports]
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp.strategy import FedAvg, Strategy  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise ConfigError(
        f"federated: Flower needs a package that is not installed ({missing.name}); pip install 'modelwright[flower]'"
    ) from None

WEIGHTS, ARRAYS, CONFIG, METRICS = "weights", "arrays", "config", "metrics"
"""The array, and the records of a message; Flower's strategies name the records so."""
NUM_LABELS = "num-examples"
"""What an update counts, under the name by which Flower's strategies look for it."""
SETTINGS, ROUNDS_DONE = "settings", "rounds-done"
"""What the server tells clients beside Flower's `server-round`: the digest of its settings, and how many rounds it had
done before it was started again."""
TRAINING_FAILED = 2
"""Flower's error code for a ClientApp that raised an exception."""


def check_flower(config: FederatedConfig) -> None:
    """Raise `ConfigError` for settings that only our own server and clients keep."""
    if config.secure_sum.enabled:
        raise ConfigError(
            "secure_sum.enabled: is not available over Flower, whose clients keep no secrets between the messages of a "
            "round; use `modelwright federated server` or switch it off"
        )
    if config.privacy.noise_multiplier:
        raise ConfigError(
            "privacy.noise_multiplier: is not available over Flower, which draws a fixed number of clients, unlike the "
            "privacy accountant; use `modelwright federated server` or set it to 0"
        )


def array_record(weights: np.ndarray) -> ArrayRecord:
    """Weights [N, float32] as Flower sends them."""
    return ArrayRecord({WEIGHTS: Array(weights.astype(np.float32))})


def weights_of(arrays: ArrayRecord) -> np.ndarray:
    """The weights [N, float32] of a message. Raises `ModelwrightError` for other arrays."""
    try:
        (array,) = arrays.values()
        weights = array.numpy()
        if weights.ndim != 1 or weights.dtype.kind != "f":
            raise ValueError(f"{weights.dtype} {weights.shape}")
    except Exception as error:  # the bytes come from somebody else; numpy has many errors for them
        raise ModelwrightError(f"federated: a message must hold one vector of weights ({error})") from None
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, and is refused as that
        return weights.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class FlowerClient:
    """A client's answers to Flower's messages."""

    config: FederatedConfig
    """Its own settings; a server that says that it has others is refused."""
    train: Trains
    num_frozen: int = 0
    """Weights, the first ones, that come from the server and are not trained."""

    def __post_init__(self) -> None:
        check_flower(self.config)

    def answer(self, message: Message) -> Message:
        """Train from the weights of a message. Raises `ModelwrightError` for a server with other settings.

        The strength of FedProx's pull is the message's (Flower's FedProx sends it), else that of the settings.
        """
        told = message.content[CONFIG]
        if told.get(SETTINGS, digest(self.config)) != digest(self.config):
            raise ModelwrightError("the server has other settings than this client; give both the same file")
        weights = weights_of(message.content[ARRAYS])
        update = self.train(
            weights,
            number=int(told["server-round"]) - 1 + int(told.get(ROUNDS_DONE, 0)),
            num_steps=self.config.local_steps,
            proximal_mu=float(told.get("proximal-mu", self.config.proximal_mu)),
        )
        if most := self.config.privacy.clip_norm:
            update = clipped(update, most)
        weights[self.num_frozen :] += update.change
        metrics = MetricRecord({NUM_LABELS: float(update.weight)})
        return Message(RecordDict({ARRAYS: array_record(weights), METRICS: metrics}), reply_to=message)


def client_app(client_of: Callable[[Context], FlowerClient], note: Note) -> ClientApp:
    """A ClientApp that trains. client_of: makes the client from its node's configuration, once for each message.

    What goes wrong the server is told without details, which could be data; `note` gets them.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            return client_of(context).answer(message)
        except ModelwrightError as error:
            note(f"training failed: {error}")
        except Exception:
            note(f"training failed: {traceback.format_exc()}")
        return Message(Error(TRAINING_FAILED, "training failed; the client's own log says why"), reply_to=message)

    return app


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """A ServerApp that runs a function."""
    app = ServerApp()
    app.main()(main)
    return app


class BoundedFedAvg(FedAvg):
    """FedAvg that refuses and scales down updates as `FederatedServer` does, and writes its state after each round.

    A reply that cannot be used leaves the others of its round alone. FedProx is the same with `proximal_mu` in the
    settings of the clients.
    """

    def __init__(
        self, config: FederatedConfig, folder: Path, note: Note, *, combine: Combine = mean_of, num_frozen: int = 0
    ) -> None:
        check_flower(config)
        super().__init__(
            fraction_train=config.client_fraction,
            fraction_evaluate=0.0,
            min_train_nodes=config.min_clients,
            min_available_nodes=config.min_clients,
            weighted_by_key=NUM_LABELS,
        )
        self.config, self.folder, self.note = config, folder, note
        self.combine, self.num_frozen = combine, num_frozen
        self.weights = np.zeros(0, np.float32)
        self.median_norm: float | None = None
        self.num_done, self.num_failed, self.started = 0, 0, 0.0
        self.log = EventLog(folder / LOG_FILE, keep_existing=True, max_events=10**6)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """What Flower's FedAvg sends; keeps the weights, from which the replies are told apart."""
        self.weights, self.started = weights_of(arrays), time.monotonic()
        self.num_done = server_round - 1 + int(config.get(ROUNDS_DONE, 0))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next weights; None, which leaves them as they are, where too few updates can be used, or a single one
        cannot be bounded. Raises `ModelwrightError` after too many such rounds in a row.
        """
        updates = {str(reply.metadata.src_node_id): self._update(reply) for reply in replies}
        size = len(self.weights) - self.num_frozen
        usable = usable_updates(updates, size=size)
        try:
            if len(usable) < self.config.min_clients:
                raise ModelwrightError(
                    f"{len(usable)} clients gave what was asked, {self.config.min_clients} are needed"
                )
            mean = mean_update(
                updates,
                size=size,
                most=self.config.privacy.clip_norm,
                max_norm_ratio=self.config.max_norm_ratio,
                last_median_norm=self.median_norm,
                weights=self.weights,
                combine=self.combine,
            )
        except ModelwrightError as error:
            refused = sorted(updates.keys() - usable.keys())
            self._finish_round(RoundResult(change=np.zeros(0), clients=(), refused=refused), str(error))
            return None, None
        self.median_norm = mean.median_norm
        self.weights = (self.weights.astype(np.float64) + mean.change).astype(np.float32)
        self._finish_round(
            RoundResult(change=mean.change, clients=sorted(usable), refused=mean.refused, scaled=mean.scaled), ""
        )
        figures = {"update-norm": float(np.linalg.norm(mean.change)), "clients": len(usable)}
        return array_record(self.weights), MetricRecord(figures)

    def _finish_round(self, result: RoundResult, error: str) -> None:
        norm = float(np.linalg.norm(result.change))
        self.log.append(
            round=self.num_done,
            clients=list(result.clients),
            refused=list(result.refused),
            scaled=list(result.scaled),
            update_norm=norm,
            seconds=time.monotonic() - self.started,
            error=error,
        )
        self.num_done += 1
        self.num_failed = self.num_failed + 1 if error else 0
        done = RoundState(num_rounds=self.num_done, weights=self.weights, median_norm=self.median_norm)
        write_round(self.folder, done)
        what = error or f"{len(result.clients)} clients, update of norm {norm:.3g}"
        self.note(f"round {self.num_done} of {self.config.num_rounds}: {what}")
        if self.num_failed == MOST_FAILED_ROUNDS:
            raise ModelwrightError(f"federated: {self.num_failed} rounds in a row gave no update; the last: {error}")

    def _update(self, reply: Message) -> ClientUpdate:
        """How a reply changes the weights; one that cannot be read counts for nothing."""
        try:
            if reply.has_error():
                raise ModelwrightError(str(reply.error.reason))
            weights = weights_of(reply.content[ARRAYS])
            if weights.shape != self.weights.shape:
                raise ModelwrightError(f"{weights.shape} weights arrived for a model of {self.weights.shape}")
            with np.errstate(over="ignore"):  # an infinite change is refused as that
                change = (weights - self.weights)[self.num_frozen :]
            return ClientUpdate(change, float(reply.content[METRICS][NUM_LABELS]))
        except (ModelwrightError, KeyError, TypeError, ValueError) as error:
            self.note(f"client {reply.metadata.src_node_id}: {error}")
            return ClientUpdate(np.zeros(0, np.float32), 0.0)


def run_rounds(grid: Grid, strategy: Strategy, config: FederatedConfig, weights: np.ndarray) -> np.ndarray:
    """Run all rounds of a strategy of Flower's from the weights [N, float32]; returns the weights after them."""
    check_flower(config)
    result = strategy.start(
        grid,
        array_record(weights),
        num_rounds=config.num_rounds,
        timeout=config.round_timeout_s,
        train_config=ConfigRecord({SETTINGS: digest(config)}),
    )
    if not result.arrays:
        raise ModelwrightError("federated: no round gave an update; see what the clients say")
    return weights_of(result.arrays)


def run_bounded_rounds(grid: Grid, strategy: BoundedFedAvg, weights: np.ndarray) -> np.ndarray:
    """Run the rounds that are left in the strategy's folder, all of them from the weights [N, float32] if it has none;
    returns the weights after them.
    """
    config = strategy.config
    state = read_round(strategy.folder, start=weights)
    strategy.weights, strategy.median_norm, first = state.weights, state.median_norm, state.num_rounds
    if first < config.num_rounds:
        strategy.start(
            grid,
            array_record(strategy.weights),
            num_rounds=config.num_rounds - first,
            timeout=config.round_timeout_s,
            train_config=ConfigRecord({SETTINGS: digest(config), ROUNDS_DONE: first}),
        )
    return strategy.weights
