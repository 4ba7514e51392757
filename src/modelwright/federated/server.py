"""The server of a federated training: rounds of asking clients, averaging their updates, and writing what came out.

It holds the global weights, and no data. A round ends with the updates of those clients that answered in time, or
without a change if they were too few.
"""

import math
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from modelwright.core.config import digest
from modelwright.core.errors import ModelwrightError
from modelwright.core.event_log import EventLog
from modelwright.core.seeds import derive_seed
from modelwright.federated.accountant import epsilon
from modelwright.federated.aggregate import ClientUpdate, Combine, clipped, mean_of, mean_update, usable_updates
from modelwright.federated.checkpoint import RoundState, read_round, write_round
from modelwright.federated.config import FederatedConfig
from modelwright.federated.fixed_point import decode
from modelwright.federated.hub import Hub, Note
from modelwright.federated.secure_bound import check_sum
from modelwright.federated.secure_sum import secure_total
from modelwright.federated.transport import PeerMessage

MOST_FAILED_ROUNDS = 5
"""In a row, before the training gives up."""
GOODBYE_S = 3.0
"""How long it waits for clients to hear that the training is over."""
LOG_FILE = "rounds.jsonl"


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The change of the global weights [N, float64] in a round, and who took part in it."""

    change: np.ndarray
    clients: Sequence[str]
    refused: Sequence[str] = ()
    scaled: Sequence[str] = ()
    median_norm: float | None = None
    """`Aggregate.median_norm`; None where updates are bounded by `privacy.clip_norm` alone."""


@dataclass(kw_only=True)
class FederatedServer:
    """Runs all rounds over the connections of a hub; goes on after the last round that is in `folder`."""

    config: FederatedConfig
    hub: Hub
    weights: np.ndarray
    """The global weights [N, float32]."""
    num_known: int
    """Clients that have a key: the population of which a round takes a sample."""
    folder: Path
    note: Note
    num_frozen: int = 0
    """Global weights, the first ones, that clients do not train."""
    combine: Combine = mean_of
    median_norm: float | None = field(default=None, init=False)
    """`Aggregate.median_norm` of the last round that changed the weights."""
    log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = EventLog(self.folder / LOG_FILE, keep_existing=True, max_events=10**6)

    def run(self) -> np.ndarray:
        """Run the rounds that are left; returns the global weights. Raises `ModelwrightError` after too many rounds in
        a row that gave no update.
        """
        state = read_round(self.folder, start=self.weights)
        self.weights, self.median_norm = state.weights, state.median_norm
        failed = 0
        for number in range(state.num_rounds, self.config.num_rounds):
            started = time.monotonic()
            self.hub.wait_for(self.config.min_clients, timeout_s=self.config.round_timeout_s)
            try:
                result = self.round(number)
                failed, text = 0, ""
                self.weights = (self.weights.astype(np.float64) + result.change).astype(np.float32)
                self.median_norm = result.median_norm
            except ModelwrightError as error:
                result, text = RoundResult(change=np.zeros(0), clients=()), str(error)
                failed += 1
            self._record(number, result, text, time.monotonic() - started)
            done = RoundState(num_rounds=number + 1, weights=self.weights, median_norm=self.median_norm)
            write_round(self.folder, done)
            if failed == MOST_FAILED_ROUNDS:
                raise ModelwrightError(f"federated: {failed} rounds in a row gave no update; the last: {text}")
        self._say_goodbye()
        return self.weights

    def _say_goodbye(self) -> None:
        """Tell all clients that the training is over, and wait for their answers: a connection that is closed while
        something is on its way may lose the message.
        """
        last = self.config.num_rounds
        end = dict.fromkeys(self.hub.names, self._message("end", last))
        self.hub.ask(end, kind="bye", round_number=last, timeout_s=GOODBYE_S)

    def round(self, number: int) -> RoundResult:
        """One round. Raises `ModelwrightError` if too few clients answered."""
        chosen = self.sample(number, self.hub.names)
        if len(chosen) < self.config.min_clients:
            raise ModelwrightError(f"federated: {len(chosen)} clients were drawn, {self.config.min_clients} are needed")
        return (
            self._secure_round(number, chosen) if self.config.secure_sum.enabled else self._plain_round(number, chosen)
        )

    def sample(self, number: int, names: Sequence[str]) -> list[str]:
        """Each client by itself with the probability `client_fraction`, as the privacy accountant has it."""
        if self.config.privacy.noise_multiplier:  # who takes part must be a secret
            return [name for name in names if secrets.SystemRandom().random() < self.config.client_fraction]
        draws = {name: random.Random(derive_seed(self.config.seed, "sample", number, name)).random() for name in names}
        return [name for name, draw in draws.items() if draw < self.config.client_fraction]

    def epsilon_after(self, num_rounds: int) -> float:
        """The privacy loss of so many rounds; infinite without noise. Rounds that were given up count, too."""
        privacy = self.config.privacy
        return epsilon(
            sampling_rate=self.config.client_fraction,
            noise_multiplier=privacy.noise_multiplier,
            num_rounds=num_rounds,
            delta=privacy.delta,
        )

    def _plain_round(self, number: int, chosen: Sequence[str]) -> RoundResult:
        task = self._task(number)
        answers = self._ask(dict.fromkeys(chosen, task), "update", number)
        updates = {name: _update(message) for name, message in answers.items()}
        size = len(self.weights) - self.num_frozen
        usable = usable_updates(updates, size=size)
        self._check_number(len(usable))
        if self.config.privacy.noise_multiplier:
            return self._private_mean(number, usable, refused=sorted(updates.keys() - usable.keys()))
        mean = mean_update(
            updates,
            size=size,
            most=self.config.privacy.clip_norm,
            max_norm_ratio=self.config.max_norm_ratio,
            last_median_norm=self.median_norm,
            weights=self.weights,
            combine=self.combine,
        )
        return RoundResult(
            change=mean.change,
            clients=sorted(usable),
            refused=mean.refused,
            scaled=mean.scaled,
            median_norm=mean.median_norm,
        )

    def _private_mean(self, number: int, updates: dict[str, ClientUpdate], *, refused: Sequence[str]) -> RoundResult:
        """The sum of clipped updates with noise, over the expected number of clients: a count of those that came would
        say who took part (McMahan et al. 2018, estimator with a fixed denominator).
        """
        most = self.config.privacy.clip_norm
        total = np.zeros(len(self.weights))
        for name in sorted(updates):
            total += clipped(updates[name], most).change
        draw = np.random.default_rng()  # from the system's entropy: whoever knew the seed could take the noise out
        total += draw.normal(0.0, self.config.privacy.noise_multiplier * most, len(total))
        scaled = sorted(name for name, update in updates.items() if update.norm > most)
        return RoundResult(change=total / self._expected, clients=sorted(updates), refused=refused, scaled=scaled)

    @property
    def _expected(self) -> float:
        return max(1.0, self.config.client_fraction * self.num_known)

    def _secure_round(self, number: int, chosen: Sequence[str]) -> RoundResult:
        secure = self.config.secure_sum
        joined = self._ask(dict.fromkeys(chosen, self._message("join", number)), "keys", number)
        keys = _text_maps(joined, "keys", lambda name: ["seal", "mask"])
        self._check_number(len(keys))
        offer = self._message("peers", number, keys=keys)
        sent = self._ask(dict.fromkeys(keys, offer), "shares", number)
        shares = _text_maps(sent, "sealed", lambda name: keys.keys() - {name})
        self._check_number(len(shares))
        tasks = {}
        for name in shares:
            sealed = {other: shares[other][name] for other in shares if other != name}
            tasks[name] = self._task(number, sealed=sealed, num_terms=len(shares))
        arrived = self._ask(tasks, "masked", number)
        size = 8 * (len(self.weights) + 1)
        masked = {name: np.frombuffer(one.body, dtype="<u8") for name, one in arrived.items() if len(one.body) == size}
        self._check_number(len(masked))
        alive, dropped = sorted(masked), sorted(shares.keys() - masked.keys())
        demand = self._message("unmask", number, alive=alive, dropped=dropped)
        answers = self._ask(dict.fromkeys(alive, demand), "revealed", number)
        own = _text_maps(answers, "own", lambda name: alive)
        common = _text_maps(answers, "mask", lambda name: dropped)
        revealed = {name: {"own": own[name], "mask": common[name]} for name in own.keys() & common.keys()}
        total = decode(
            secure_total(masked, revealed, keys, list(shares), round_number=number, threshold=secure.threshold),
            fraction_bits=secure.fraction_bits,
        )
        change, weight = total[:-1], float(total[-1])
        check_sum(change, self.config, clients=alive, weight=weight)
        if self.config.privacy.noise_multiplier:
            weight = self._expected
        return RoundResult(change=change / weight, clients=alive, refused=dropped)

    def _task(self, number: int, **more: object) -> PeerMessage:
        """What a client needs for its part of a round."""
        return self._message("train", number, self.weights.astype("<f4").tobytes(), **more)

    def _message(self, kind: str, number: int, body: bytes = b"", **more: object) -> PeerMessage:
        return PeerMessage({"kind": kind, "round": number, "settings": digest(self.config), **more}, body)

    def _ask(self, messages: dict[str, PeerMessage], kind: str, number: int) -> dict[str, PeerMessage]:
        return self.hub.ask(messages, kind=kind, round_number=number, timeout_s=self.config.round_timeout_s)

    def _check_number(self, num_clients: int) -> None:
        if num_clients < self.config.min_clients:
            raise ModelwrightError(
                f"federated: {num_clients} clients gave what was asked, {self.config.min_clients} are needed"
            )

    def _record(self, number: int, result: RoundResult, text: str, seconds: float) -> None:
        loss = self.epsilon_after(number + 1)
        self.log.append(
            round=number,
            clients=list(result.clients),
            refused=list(result.refused),
            scaled=list(result.scaled),
            update_norm=float(np.linalg.norm(result.change)),
            seconds=seconds,
            epsilon=loss,
            error=text,
        )
        private = f", epsilon {loss:.2f} at delta {self.config.privacy.delta:g}" if math.isfinite(loss) else ""
        what = text or f"{len(result.clients)} clients, update of norm {np.linalg.norm(result.change):.3g}{private}"
        self.note(f"round {number + 1} of {self.config.num_rounds}: {what}")


def _update(message: PeerMessage) -> ClientUpdate:
    """An update as it arrived; one that cannot be read counts for nothing."""
    try:
        return ClientUpdate(np.frombuffer(message.body, dtype="<f4"), float(message.header.get("weight", 0.0)))
    except (TypeError, ValueError):
        return ClientUpdate(np.zeros(0, dtype=np.float32), 0.0)


def _text_maps(
    answers: Mapping[str, PeerMessage], key: str, wanted: Callable[[str], Iterable[str]]
) -> dict[str, dict[str, str]]:
    """A mapping of hexadecimal digits from each client's answer; a client whose answer lacks any, or has something
    else, is left out.
    """
    result = {}
    for name, message in answers.items():
        given = message.header.get(key)
        if isinstance(given, dict) and all(_is_hex(given.get(one)) for one in wanted(name)):
            result[name] = {one: given[one] for one in wanted(name)}
    return result


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[0-9a-f]{1,4096}", value))
