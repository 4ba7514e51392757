"""The server of a federated training: in each round it asks clients, checks their replies, and has Flower's strategy
compute the next global weights. It holds no training data.

The rounds are a separate loop around Flower's strategies, because `Strategy.start` cannot resume after a round that a
killed server has finished, and one reply with a NaN spoils its mean.
"""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, FedProx, Strategy
from flwr.simulation import run_simulation
from safetensors.numpy import load_file, save_file

from modelwright.core.artifacts import ArtifactError, make_folder, write_artifact, write_atomic, writing
from modelwright.core.config import ConfigError, ModelwrightError, digest
from modelwright.core.records import EventLog
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.adapters import merge_adapters
from modelwright.pipeline.models import find_model
from modelwright.pipeline.stages.init import save_model_folder
from modelwright_federated.client import FederatedClient, Note, client_app, note, text_option
from modelwright_federated.config import FederatedConfig, load_settings
from modelwright_federated.flower import (
    ARRAYS,
    CLIENT,
    METRICS,
    NUM_LABELS,
    SETTINGS,
    WEIGHTS,
    array_record,
    check_flower,
    weights_of,
)  # fmt: skip
from modelwright_federated.local_training import ClientUpdate
from modelwright_federated.privacy import epsilon_after, noise_ratio, noise_warning
from modelwright_federated.secure import secure_mean
from modelwright_federated.weights import AdaptedProjection, GlobalWeights, add_missed_products, begin_model

MOST_FAILED_ROUNDS = 5
"""Number of consecutive failed rounds after which the training gives up."""
LOG_FILE, STATE, GLOBAL, MODEL_FOLDER = "rounds.jsonl", "round.json", "global-{}.safetensors", "model"
WAIT_S = 0.2
START_TIMEOUT_S = 900.0
"""Seconds within which the processes of a simulation must have started."""
RAY_STARTS = 3
"""Number of attempts to start Ray. Its raylet ends if one of its agents needs more than 15 s to start, which cannot be
configured (ray-project/ray, issue 65983); the next attempt finds the agent's files in memory."""


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """The server's state between rounds."""

    num_rounds: int = 0
    """Number of finished rounds, including those without an update."""
    arrays: Mapping[str, np.ndarray]
    """`weights`, the global weights [N, float32], and the moments `m` and `v` of a strategy that has them."""
    median_norm: float | None = None
    """Lower median norm of the last round with at least two updates; None before the first one."""


@dataclass
class RoundResult:
    """Clients of a round, and the treatment of their updates."""

    clients: Sequence[str] = ()
    refused: Sequence[str] = ()
    """Clients whose updates were not finite, had no weight, or did not arrive."""
    scaled: Sequence[str] = ()
    update_norm: float = 0.0
    loss: float = math.nan
    """Mean loss of the clients' steps, in nats per label."""
    error: str = ""


def new_strategy(config: FederatedConfig) -> Strategy:
    """Builds Flower's strategy for these settings. Its noise is scaled for a fixed number of clients; under secure
    aggregation the clients add the noise themselves.
    """
    drawn = {
        "fraction_train": 1e-9 if config.clients_per_round else 1.0,  # 0 would switch training off
        "fraction_evaluate": 0.0,
        "min_train_nodes": config.num_awaited,
        "min_available_nodes": config.num_awaited,
        "weighted_by_key": NUM_LABELS,
    }
    match config.strategy:
        case "fedprox":
            strategy = FedProx(**drawn, proximal_mu=config.proximal_mu)
        case "fedadam":
            strategy = FedAdam(**drawn, eta=config.server_learning_rate)
        case _:
            strategy = FedAvg(**drawn)
    if config.privacy.epsilon and not config.secure_aggregation.enabled:
        np.random.seed()  # Flower draws its noise there; whoever knew the seed could take it out
        return DifferentialPrivacyServerSideFixedClipping(
            strategy, config.noise_multiplier, config.privacy.clip_norm, config.clients_per_round
        )
    return strategy


@dataclass(kw_only=True)
class FederatedServer:
    """Runs all rounds; continues after the last round that `folder` contains."""

    config: FederatedConfig
    grid: Grid
    context: Context
    weights: np.ndarray
    """Global weights [N, float32]."""
    folder: Path
    note: Note
    projections: Sequence[AdaptedProjection] = ()
    """Projections with adapters if `aggregation` is `fedex`, else ()."""
    num_frozen: int = 0
    median_norm: float | None = field(default=None, init=False)

    def run(self) -> np.ndarray:
        """Runs the rounds and returns the final global weights. Raises `ModelwrightError` after too many consecutive
        rounds without an update.
        """
        config, strategy = self.config, new_strategy(self.config)
        state = read_round(self.folder, config, start=self.weights)
        self.weights, self.median_norm = state.arrays["weights"], state.median_norm
        if "m" in state.arrays:
            strategy.m_t, strategy.v_t = {WEIGHTS: state.arrays["m"]}, {WEIGHTS: state.arrays["v"]}  # pyright: ignore
        log, failed = EventLog(self.folder / LOG_FILE, keep_existing=True, max_events=10**6), 0
        self._note_privacy()
        for number in range(state.num_rounds, config.num_rounds):
            started = time.monotonic()
            try:
                result, failed = self._round(number, strategy), 0
            except ModelwrightError as error:
                result, failed = RoundResult(error=str(error)), failed + 1
            epsilon = epsilon_after(number + 1, noise_multiplier=config.noise_multiplier, delta=config.privacy.delta)
            seconds = time.monotonic() - started
            log.append(round=number, **vars(result), seconds=seconds, epsilon=epsilon)
            self._write_round(number + 1, strategy)
            shown = f"{len(result.clients)} clients, update of norm {result.update_norm:.3g}"
            shown += f", loss {result.loss:.3f}" if math.isfinite(result.loss) else ""
            shown += f", epsilon {epsilon:.2f} at delta {config.privacy.delta:g}" if math.isfinite(epsilon) else ""
            self.note(f"round {number + 1} of {config.num_rounds}: {result.error or shown}")
            if failed == min(MOST_FAILED_ROUNDS, config.num_rounds - state.num_rounds):
                raise ModelwrightError(f"federated: {failed} rounds in a row gave no update; the last: {result.error}")
        return self.weights

    def _note_privacy(self) -> None:
        config = self.config
        if not config.privacy.epsilon:
            return
        sizes = {"num_weights": len(self.weights), "num_clients": config.clients_per_round}
        ratio = noise_ratio(config.noise_multiplier, **sizes)
        self.note(
            f"epsilon {config.privacy.epsilon:g} over {config.num_rounds} rounds: noise multiplier "
            f"{config.noise_multiplier:.2f}; the noise of a round is {ratio:.1f} times as long as the longest update"
        )
        if warning := noise_warning(ratio, **sizes):
            self.note(f"warning: {warning}")

    def _round(self, number: int, strategy: Strategy) -> RoundResult:
        """Runs a round, which changes the weights. Raises `ModelwrightError` if too few clients answered."""
        config, deadline = self.config, time.monotonic() + self.config.round_timeout_s
        while (num_nodes := len(list(self.grid.get_node_ids()))) < config.num_awaited:  # Flower would wait without end
            if time.monotonic() > deadline:
                raise ModelwrightError(f"{num_nodes} clients are connected, {config.num_awaited} are needed")
            time.sleep(WAIT_S)
        told = ConfigRecord({SETTINGS: digest(config)})
        messages = list(strategy.configure_train(number + 1, array_record(self.weights), told, self.grid))
        if config.secure_aggregation.enabled:
            secure = secure_mean(self.grid, self.context, config, messages)
            replies = [self._reply(messages[0], secure.mean)]
            result = RoundResult(clients=secure.clients, refused=[f"{secure.num_lost} lost"] * bool(secure.num_lost))
            self._check_number(len(secure.clients))
        else:
            answers = list(self.grid.send_and_receive(messages, timeout=config.round_timeout_s))
            result, replies = self._checked(messages, answers)
        arrays, metrics = strategy.aggregate_train(number + 1, replies)
        if arrays is None:
            raise ModelwrightError("Flower's strategy gave no weights; its log says why")
        mean = weights_of(arrays)
        if self.projections:
            labels = [float(one.content[METRICS][NUM_LABELS]) for one in replies]
            clients = [weights_of(one.content[ARRAYS]) for one in replies]
            add_missed_products(mean, clients, [one / sum(labels) for one in labels], self.projections)
        result.update_norm = float(np.linalg.norm(mean - self.weights))
        result.loss = float(metrics.get("loss", math.nan)) if metrics else math.nan
        self.weights = mean.astype(np.float32)
        return result

    def _checked(self, messages: Sequence[Message], answers: Sequence[Message]) -> tuple[RoundResult, list[Message]]:
        """Selects the replies for Flower's strategy: usable updates, bounded in norm. With noise, clients without a
        usable update count as unchanged, so that the noise, which is scaled for a fixed number of clients, remains
        sufficient.
        """
        config, names, updates = self.config, dict[int, str](), dict[int, ClientUpdate]()
        for answer in answers:
            node = answer.metadata.src_node_id
            names[node] = str(node)
            try:
                if answer.has_error():
                    raise ModelwrightError(str(answer.error.reason))
                names[node] = str(answer.content[CLIENT]["name"])
                updates[node] = self._update(answer)
            except (ModelwrightError, KeyError, TypeError, ValueError) as error:
                self.note(f"client {names[node]}: {error}")
        self._check_number(len(updates))
        bound = self._bound(updates)
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in updates:
                replies.append(self._reply(message, updates[node].clipped(bound)))
            elif config.privacy.epsilon:
                replies.append(self._reply(message, ClientUpdate(np.zeros(self._num_trained, np.float32), 1.0)))
        drawn = {message.metadata.dst_node_id for message in messages}
        return RoundResult(
            clients=sorted(names[node] for node in updates),
            refused=sorted(names.get(node, str(node)) for node in drawn - updates.keys()),
            scaled=sorted(names[node] for node, update in updates.items() if update.norm > bound),
        ), replies

    @property
    def _num_trained(self) -> int:
        return len(self.weights) - self.num_frozen

    def _update(self, answer: Message) -> ClientUpdate:
        """Reads the change of the weights from a reply. Raises `ModelwrightError` for an unusable one."""
        weights = weights_of(answer.content[ARRAYS])
        if weights.shape != self.weights.shape:
            raise ModelwrightError(f"{weights.shape} weights arrived for a model of {self.weights.shape}")
        metrics = answer.content[METRICS]
        weight = float(metrics[NUM_LABELS])
        with np.errstate(over="ignore", invalid="ignore"):
            change = (weights - self.weights)[self.num_frozen :]
        if not np.isfinite(change).all() or not 0 < weight < math.inf:
            raise ModelwrightError("its update is not finite, or counts for nothing")
        return ClientUpdate(
            change, 1.0 if self.config.privacy.epsilon else weight, float(metrics.get("loss", math.nan))
        )

    def _bound(self, updates: Mapping[int, ClientUpdate]) -> float:
        """Returns the norm to which updates are scaled down. Raises `ModelwrightError` if no bound is known.

        The bound is based on the lower median, which of two updates is the shorter one: with the mean of both, a single
        huge update would raise its own bound. A single update is compared with those of an earlier round; it does not
        change the median for later rounds either, or it could grow from round to round.
        """
        if len(updates) > 1:
            self.median_norm = statistics.median_low(update.norm for update in updates.values())
        bounds = [self.config.privacy.clip_norm] * bool(self.config.privacy.clip_norm)
        if self.median_norm is not None:
            bounds.append(self.config.max_norm_ratio * self.median_norm)
        if not bounds:
            raise ModelwrightError(
                "a single update came, and no earlier round says how long updates are; set privacy.clip_norm, or "
                "min_clients to 2 or more"
            )
        return min(bounds)

    def _reply(self, message: Message, update: ClientUpdate) -> Message:
        """Builds the reply that Flower's strategy receives: the client's weights in 64 bits, so that their mean rounds
        only once.
        """
        weights = self.weights.astype(np.float64)
        weights[self.num_frozen :] += update.change
        if not update.change.any():  # Flower's clipping divides by the norm
            weights[self.num_frozen] += 1e-12
        metrics = {NUM_LABELS: float(update.weight)} | ({} if math.isnan(update.loss) else {"loss": update.loss})
        return Message(RecordDict({ARRAYS: array_record(weights), METRICS: MetricRecord(metrics)}), reply_to=message)

    def _check_number(self, num_clients: int) -> None:
        if num_clients < self.config.min_clients:
            raise ModelwrightError(f"{num_clients} clients sent a usable update, {self.config.min_clients} are needed")

    def _write_round(self, num_rounds: int, strategy: Strategy) -> None:
        """Writes the arrays, then the file that names them, then removes the older arrays."""
        make_folder(self.folder)
        moments = {"m": getattr(strategy, "m_t", None), "v": getattr(strategy, "v_t", None)}
        arrays = {"weights": self.weights} | {name: one[WEIGHTS] for name, one in moments.items() if one}
        path = self.folder / GLOBAL.format(num_rounds)
        with writing(path):
            save_file(arrays, path)
        plain = {
            "num_rounds": num_rounds, "arrays": path.name, "median_norm": self.median_norm,
            "noise_multiplier": self.config.noise_multiplier,
        }  # fmt: skip
        write_atomic(self.folder / STATE, json.dumps(plain))
        # Only now: until the state names the new file, a resumed server needs the older one.
        for older in self.folder.glob(GLOBAL.format("*")):
            if older != path:
                older.unlink(missing_ok=True)


def read_round(folder: Path, config: FederatedConfig, *, start: np.ndarray) -> RoundState:
    """Reads the state after the last round; before the first one its weights are `start` [N, float32]. Raises
    `ArtifactError` for damaged files, and `ConfigError` if the existing rounds had other noise.
    """
    if not (folder / STATE).exists():
        return RoundState(arrays={"weights": start})
    try:
        plain = json.loads((folder / STATE).read_text(encoding="utf-8"))
        arrays = load_file(folder / plain["arrays"])
        state = RoundState(num_rounds=int(plain["num_rounds"]), arrays=arrays, median_norm=plain["median_norm"])
        noise, _ = float(plain["noise_multiplier"]), arrays["weights"]
    except Exception as error:  # safetensors has errors of its own
        raise ArtifactError(f"{folder / STATE}: is damaged ({error}); remove {folder} to start over") from None
    if noise != config.noise_multiplier:
        raise ConfigError(
            f"privacy.epsilon: the rounds in {folder} had a noise multiplier of {noise:.3g}, and these settings have "
            f"{config.noise_multiplier:.3g}; restore the settings, or start over with another --dir"
        )
    return state


def train_from(start: Path, config: FederatedConfig, grid: Grid, context: Context, folder: Path) -> Path:
    """Runs the rounds from a model; returns the folder of the resulting model. start: a run or a model folder."""
    weights = GlobalWeights(begin_model(start, config), config.lora)
    server = FederatedServer(
        config=config,
        grid=grid,
        context=context,
        weights=weights.read(),
        folder=folder,
        note=note,
        projections=weights.projections(),
        num_frozen=weights.num_frozen,
    )
    weights.write(server.run())
    if weights.personal:
        return folder  # without a client's own B the adapters do nothing; each client has written its own
    merge_adapters(weights.model)
    with write_artifact(folder / MODEL_FOLDER, kind="federated", digest=digest(config)) as draft:
        save_model_folder(weights.model, Tokenizer.load(find_model(start).source.folder), draft.path)
    return folder / MODEL_FOLDER


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """Wraps a function in a ServerApp."""
    app = ServerApp()
    app.main()(main)
    return app


def server() -> ServerApp:
    """Returns the ServerApp of a deployment, whose configuration (`[tool.flwr.app.config]`, or `flwr run --run-config`)
    has `model` (a run or a model folder), `settings` (the YAML file) and `dir`.
    """

    check_flower()

    def main(grid: Grid, context: Context) -> None:
        start, settings, folder = (
            Path(text_option(context.run_config, key, "--run-config")) for key in ("model", "settings", "dir")
        )
        note(f"wrote {train_from(start, load_settings(settings), grid, context, folder)}")

    return server_app(main)


def simulate(
    main: Callable[[Grid, Context], None],
    client_of: Callable[[int], FederatedClient],
    *,
    num_clients: int,
    num_processes: int,
) -> None:
    """Runs a training in Flower's simulation: clients take turns in processes of Ray on this machine.

    main: runs the rounds, once the processes have started; client_of: makes a client from its number, in such a
    process, once for each message. Raises `ModelwrightError` if the processes do not start.
    """
    _start_ray(min(num_processes, num_clients))

    def started(grid: Grid, context: Context) -> None:
        _await_processes(grid, num_clients)
        main(grid, context)

    run_simulation(
        server_app(started),
        client_app(lambda context: client_of(int(context.node_config["partition-id"])), note),
        num_supernodes=num_clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


def _start_ray(num_processes: int) -> None:
    """Starts Ray before Flower would: if Ray fails to start there, Flower's server keeps running, and every round waits
    for clients that do not exist. Raises `ModelwrightError` if Ray does not start.
    """
    import ray

    import_path = os.pathsep.join(sys.path)  # Flower gives it to Ray's processes in the same way
    for _ in range(RAY_STARTS):
        try:
            ray.init(
                address="local",
                num_cpus=num_processes,
                include_dashboard=False,
                runtime_env={"env_vars": {"PYTHONPATH": import_path}},
                _node_ip_address="127.0.0.1",
                # By default Ray lowers the priority of its processes, which do all the work here, below that of
                # everything else on the machine; on a busy one they get no time, and no client answers.
                _system_config={"worker_niceness": 0},
            )
            return
        except Exception as error:  # whose type is `Exception`
            ray.shutdown()
            failure = error
            note(f"Ray did not start: {error}")
    raise ModelwrightError(
        f"federated: Ray did not start in {RAY_STARTS} attempts ({failure}); its logs are in "
        "/tmp/ray/session_latest/logs"
    )


def _await_processes(grid: Grid, num_clients: int) -> None:
    """Waits until all clients answer. Ray's processes start and import PyTorch for the first message; on a busy machine
    that takes minutes, which would otherwise count against the timeout of the first round. Raises `ModelwrightError` if
    a client does not answer in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(nodes := list(grid.get_node_ids())) < num_clients and time.monotonic() < deadline:
        time.sleep(WAIT_S)
    questions = [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]
    answers = list(grid.send_and_receive(questions, timeout=deadline - time.monotonic()))
    if errors := [str(answer.error.reason) for answer in answers if answer.has_error()]:
        raise ModelwrightError(f"federated: a process of the simulation failed when it started ({errors[0]})")
    if len(answers) < num_clients:
        raise ModelwrightError(
            f"federated: {len(answers)} of {num_clients} clients answered in {START_TIMEOUT_S:g} s; the logs of their "
            "processes are in /tmp/ray/session_latest/logs"
        )
