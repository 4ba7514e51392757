"""A client of a federated training: it keeps its data, and sends updates: clipped, with noise, masked.

How much an update reveals follows from the client's own settings; a server with others is refused.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from modelwright.core.config import digest
from modelwright.core.errors import ModelwrightError
from modelwright.federated.aggregate import ClientUpdate, clipped
from modelwright.federated.config import FederatedConfig
from modelwright.federated.fixed_point import encode
from modelwright.federated.hub import Note
from modelwright.federated.secure_bound import client_noise_std
from modelwright.federated.secure_sum import SecureClient
from modelwright.federated.transport import ConnectionLostError, PeerConnection, PeerMessage, connect_server

RETRY_S = 1.0


class Trains(Protocol):
    """Makes a client's update (`LocalTraining.round`)."""

    def __call__(self, weights: np.ndarray, *, number: int, num_steps: int, proximal_mu: float) -> ClientUpdate: ...


@dataclass(kw_only=True)
class FederatedClient:
    """Takes part until the server says that all rounds are done. A lost connection is made again."""

    name: str
    key: bytes
    host: str
    port: int
    config: FederatedConfig
    train: Trains
    most_bytes: int
    note: Note
    patience_s: float = 60.0
    """How long it tries to reach the server."""
    secure: SecureClient | None = None
    """Its side of the secure sum of the round at hand."""

    def run(self) -> None:
        """Raises `ConnectionLostError` if the server cannot be reached for `patience_s` seconds."""
        while True:
            connection = self._connect()
            try:
                while (message := connection.receive()).kind != "end":
                    self._answer(connection, message)
                with suppress(ConnectionLostError):
                    connection.send(PeerMessage({"kind": "bye", "round": message.header["round"]}))
                return
            except ConnectionLostError as error:
                self.note(f"connection lost: {error}")
            finally:
                connection.close()

    def _connect(self) -> PeerConnection:
        end = time.monotonic() + self.patience_s
        while True:
            try:
                return connect_server(
                    self.host,
                    self.port,
                    name=self.name,
                    key=self.key,
                    most_bytes=self.most_bytes,
                    timeout_s=self.patience_s,
                )
            except ConnectionLostError:
                if time.monotonic() >= end:
                    raise
                time.sleep(RETRY_S)

    def _answer(self, connection: PeerConnection, message: PeerMessage) -> None:
        """Do what a message asks. What goes wrong here the server is told, without details: they could be data."""
        header = message.header
        try:
            answer = self.answer(message)
        except (ModelwrightError, KeyError, TypeError, ValueError) as error:  # the message may be malformed
            self.note(f"round {header.get('round')}: {error}")
            answer = PeerMessage({"kind": "failed", "round": header.get("round")})
        connection.send(answer)

    def answer(self, message: PeerMessage) -> PeerMessage:
        """The answer to one message. Raises `ModelwrightError` for one that is out of order."""
        header = message.header
        about = {"round": header["round"]}
        if header["settings"] != digest(self.config):
            raise ModelwrightError("the server has other settings than this client; give both the same file")
        match message.kind:
            case "join":
                threshold = self.config.secure_sum.threshold
                self.secure = SecureClient(self.name, round_number=header["round"], threshold=threshold)
                return PeerMessage({"kind": "keys", "keys": self.secure.public_keys(), **about})
            case "peers":
                return PeerMessage({"kind": "shares", "sealed": self._secure(header).shares(header["keys"]), **about})
            case "train" if self.config.secure_sum.enabled:
                return self._masked_update(message)
            case "train":
                update = self._update(message)
                body = update.change.astype("<f4").tobytes()
                return PeerMessage({"kind": "update", "weight": update.weight, **about}, body)
            case "unmask":
                shares = self._secure(header).reveal(header["alive"], header["dropped"])
                return PeerMessage({"kind": "revealed", **shares, **about})
            case _:
                raise ModelwrightError(f"the server asks for {message.kind!r}, which this client does not know")

    def _update(self, message: PeerMessage) -> ClientUpdate:
        update = self.train(
            np.frombuffer(message.body, dtype="<f4").astype(np.float32),
            number=message.header["round"],
            num_steps=self.config.local_steps,
            proximal_mu=self.config.proximal_mu,
        )
        most = self.config.privacy.clip_norm
        return clipped(update, most) if most else update

    def _masked_update(self, message: PeerMessage) -> PeerMessage:
        """The update times its weight, and the weight, as integers under masks.

        With noise every update counts the same, and each of at least `threshold` clients adds its share of the noise,
        so that the sum has enough of it without those that drop out. Without noise, the weight is the number of labels.
        """
        header, privacy, secure = message.header, self.config.privacy, self.config.secure_sum
        update = self._update(message)
        if not np.isfinite(update.change).all() or not update.weight > 0:
            raise ModelwrightError("this client's update is not finite, or is over no labels, and is not sent")
        numbers, weight = update.change.astype(np.float64), 1.0
        if privacy.noise_multiplier:
            numbers = numbers + np.random.default_rng().normal(0.0, client_noise_std(self.config), len(numbers))
        else:
            weight = update.weight
            numbers = numbers * weight
        encoded = encode(np.append(numbers, weight), fraction_bits=secure.fraction_bits, num_terms=header["num_terms"])
        masked = self._secure(header).masked(encoded, header["sealed"])
        return PeerMessage({"kind": "masked", "round": header["round"]}, masked.astype("<u8").tobytes())

    def _secure(self, header: Mapping[str, Any]) -> SecureClient:
        """This round's side of the secure sum."""
        if self.secure is None or self.secure.round_number != header["round"]:
            raise ModelwrightError(f"the server is in round {header['round'] + 1}, which this client did not join")
        return self.secure
