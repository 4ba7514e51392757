"""Secure aggregation with dropouts (Bonawitz et al., CCS 2017, figure 4, for servers that follow the protocol).

Each client adds to its numbers a mask of its own and, for each other client, a mask that both know and that one adds
and the other subtracts; all modulo 2^64. The seeds of the masks are shared among the clients (Shamir), so that those
who stay can take out what is left of them: for a client that is still there the seed of its own mask, for one that
dropped out its key of the common masks, and never both.

Phases: keys, shares, masked numbers, revealed shares. `SecureClient` is one client's side of one round, `secure_total`
the server's last step; messages are JSON values with bytes as hexadecimal digits.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelwright.core.errors import ModelwrightError
from modelwright.federated.libraries import derive_key, key_stream, sealing_cipher, x25519
from modelwright.federated.shamir import SECRET_BYTES, join_secret, split_secret

Keys = Mapping[str, Mapping[str, str]]
"""Public keys by client: `seal` for messages between clients, `mask` for the common masks."""


class SecureClient:
    """One client in one round. Every method is called once, in the order of the phases."""

    def __init__(self, name: str, *, round_number: int, threshold: int) -> None:
        self.name, self.round_number, self.threshold = name, round_number, threshold
        self._seal, self._mask = x25519().X25519PrivateKey.generate(), x25519().X25519PrivateKey.generate()
        self._own_seed = secrets.token_bytes(SECRET_BYTES)
        self._keys: Keys = {}
        self._shared_by: dict[str, str] = {}
        self._has_revealed = False

    def public_keys(self) -> dict[str, str]:
        """Phase 1: what all others may know."""
        return {"seal": _public(self._seal), "mask": _public(self._mask)}

    def shares(self, keys: Keys) -> dict[str, str]:
        """Phase 2: for each other client its shares of the two secrets, sealed so that the server cannot read them.

        Raises `ModelwrightError` for fewer clients than the threshold, a key that occurs twice, or without the own one.
        """
        if len(keys) < self.threshold:
            raise ModelwrightError(f"secure sum: {len(keys)} clients, but {self.threshold} are needed")
        if keys.get(self.name) != self.public_keys():
            raise ModelwrightError("secure sum: the server's list has another key for this client")
        every = [key for own in keys.values() for key in own.values()]
        if len(set(every)) < len(every):
            raise ModelwrightError("secure sum: two clients have the same key")
        self._keys = keys
        places = place_of(keys)
        split = {
            "own": split_secret(self._own_seed, threshold=self.threshold, places=list(places.values())),
            "mask": split_secret(_private(self._mask), threshold=self.threshold, places=list(places.values())),
        }
        sealed = {}
        for other, place in places.items():
            text = json.dumps({kind: f"{shares[place]:x}" for kind, shares in split.items()})
            if other == self.name:
                self._shared_by[other] = text
            else:
                sealed[other] = (
                    self._cipher(other).encrypt(bytes(12), text.encode(), self._route(self.name, other)).hex()
                )
        return sealed

    def masked(self, numbers: np.ndarray, sealed: Mapping[str, str]) -> np.ndarray:
        """Phase 3: the numbers [N, uint64] with all masks. sealed: the shares from each client that sent any.

        Raises `ModelwrightError` for fewer clients than the threshold.
        """
        if len(sealed) + 1 < self.threshold:
            raise ModelwrightError(
                f"secure sum: {len(sealed) + 1} clients sent shares, but {self.threshold} are needed"
            )
        for other, text in sealed.items():
            self._shared_by[other] = text
        total = numbers + own_mask(self._own_seed, len(numbers))
        for other in sealed:
            mask = common_mask(self._mask, self._keys[other]["mask"], self.round_number, len(numbers))
            total = total + mask if self.name < other else total - mask
        return total

    def reveal(self, alive: Sequence[str], dropped: Sequence[str]) -> dict[str, dict[str, str]]:
        """Phase 4: this client's shares of the own masks of those whose numbers arrived, and of the keys of those whose
        did not.

        Raises `ModelwrightError`, and reveals nothing, if that would uncover an update: a second demand, a client in
        both lists, or too few that are alive.
        """
        if self._has_revealed:
            raise ModelwrightError("secure sum: the server asks for shares twice")
        if set(alive) & set(dropped) or not {*alive, *dropped} <= set(self._shared_by):
            raise ModelwrightError("secure sum: the server's lists of clients do not fit together")
        if len(set(alive)) < self.threshold or self.name not in alive:
            raise ModelwrightError(f"secure sum: {len(set(alive))} clients are left, but {self.threshold} are needed")
        self._has_revealed = True
        return {
            "own": {other: self._opened(other)["own"] for other in alive},
            "mask": {other: self._opened(other)["mask"] for other in dropped},
        }

    def _opened(self, other: str) -> dict[str, str]:
        """The shares that another client, or this one, gave to this client."""
        text = self._shared_by[other]
        if other == self.name:
            return json.loads(text)
        try:
            plain = self._cipher(other).decrypt(bytes(12), bytes.fromhex(text), self._route(other, self.name))
        except Exception:  # InvalidTag is no ValueError
            raise ModelwrightError(f"secure sum: the share from {other} is not authentic") from None
        return json.loads(plain)

    def _cipher(self, other: str) -> Any:
        """The cipher of this pair in this round."""
        return _PairCipher(self._seal, self._keys[other]["seal"], self.round_number)

    @staticmethod
    def _route(sender: str, receiver: str) -> bytes:
        return json.dumps([sender, receiver]).encode()


class _PairCipher:
    """Seals one message in each direction. The direction is part of the key, so that no nonce is used twice."""

    def __init__(self, private: Any, public: str, round_number: int) -> None:
        self._secret, self._salt = _exchange(private, public), round_number.to_bytes(8, "big")

    def encrypt(self, nonce: bytes, data: bytes, route: bytes) -> bytes:
        return self._of(route).encrypt(nonce, data, route)

    def decrypt(self, nonce: bytes, data: bytes, route: bytes) -> bytes:
        return self._of(route).decrypt(nonce, data, route)

    def _of(self, route: bytes) -> Any:
        return sealing_cipher(derive_key(self._secret, salt=self._salt, purpose=f"shares {route.decode()}"))


def place_of(names: Mapping[str, Any] | Sequence[str]) -> dict[str, int]:
    """The place of each client's share, from 1: by the order of names, the same for all."""
    return {name: number for number, name in enumerate(sorted(names), start=1)}


def own_mask(seed: bytes, num_values: int) -> np.ndarray:
    """A client's own mask [N, uint64]."""
    return _stream(derive_key(seed, salt=b"", purpose="own mask"), num_values)


def common_mask(private: Any, public: str, round_number: int, num_values: int) -> np.ndarray:
    """The mask [N, uint64] that two clients have in common."""
    secret = _exchange(private, public)
    return _stream(derive_key(secret, salt=round_number.to_bytes(8, "big"), purpose="common mask"), num_values)


def secure_total(
    masked: Mapping[str, np.ndarray],
    revealed: Mapping[str, Mapping[str, Mapping[str, str]]],
    keys: Keys,
    shared: Sequence[str],
    *,
    round_number: int,
    threshold: int,
) -> np.ndarray:
    """The sum [N, uint64] of the numbers of all clients in `masked`.

    revealed: the answers of phase 4; keys: of phase 1; shared: the clients that sent shares, whose masks are in the
    numbers. Raises `ModelwrightError` if fewer clients than the threshold sent numbers or revealed shares.
    """
    if len(masked) < threshold or len(revealed) < threshold:
        left = min(len(masked), len(revealed))
        raise ModelwrightError(
            f"secure sum: {left} clients are left, but {threshold} are needed; the round is given up"
        )
    places = place_of(keys)
    total: np.ndarray = np.asarray(np.sum(list(masked.values()), axis=0, dtype=np.uint64))
    size = len(total)

    def secret(kind: str, name: str) -> bytes:
        shares = {places[by]: int(answer[kind][name], 16) for by, answer in revealed.items() if name in answer[kind]}
        return join_secret(shares, threshold=threshold)

    for name in masked:
        total = total - own_mask(secret("own", name), size)
    for name in set(shared) - masked.keys():
        private = x25519().X25519PrivateKey.from_private_bytes(secret("mask", name))
        if _public(private) != keys[name]["mask"]:
            raise ModelwrightError(
                f"secure sum: the revealed shares do not give the key of {name}; the round is given up"
            )
        for other in masked:
            mask = common_mask(private, keys[other]["mask"], round_number, size)
            total = total - mask if other < name else total + mask
    return total


def _stream(seed: bytes, num_values: int) -> np.ndarray:
    return np.frombuffer(key_stream(seed, 8 * num_values), dtype="<u8").astype(np.uint64)


def _exchange(private: Any, public: str) -> bytes:
    try:
        return private.exchange(x25519().X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    except ValueError:  # no 32 bytes, or a point of low order
        raise ModelwrightError("secure sum: a client's key is no X25519 key") from None


def _public(private: Any) -> str:
    return private.public_key().public_bytes_raw().hex()


def _private(private: Any) -> bytes:
    return private.private_bytes_raw()
