"""Secret sharing, fixed-point numbers, and the secure sum with clients that drop out in each phase."""

import itertools

import numpy as np
import pytest

pytest.importorskip("cryptography")

from modelwright.core.errors import ConfigError, ModelwrightError
from modelwright.federated.fixed_point import decode, encode
from modelwright.federated.secure_sum import SecureClient, secure_total
from modelwright.federated.shamir import PRIME, join_secret, split_secret

NAMES = ("ann", "ben", "cem", "dia", "eva")
THRESHOLD, BITS, ROUND = 3, 24, 7


def test_any_shares_of_the_threshold_give_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(32))
    shares = split_secret(secret, threshold=3, places=[1, 2, 3, 4, 5])
    for chosen in itertools.combinations(shares, 3):
        assert join_secret({place: shares[place] for place in chosen}, threshold=3) == secret
    with pytest.raises(ModelwrightError, match="2 shares of a secret, but 3 are needed"):
        join_secret({1: shares[1], 2: shares[2]}, threshold=3)
    wrong = {1: shares[1], 2: shares[2], 3: shares[3] * shares[4] % PRIME}
    with pytest.raises(ModelwrightError, match="do not belong together"):
        join_secret(wrong, threshold=3)
    assert split_secret(secret, threshold=3, places=[1, 2, 3]) != split_secret(secret, threshold=3, places=[1, 2, 3])


def test_fixed_point_sums_are_exact() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(0, 3, (6, 100))
    encoded = [encode(row, fraction_bits=BITS, num_terms=6) for row in rows]
    total = decode(np.sum(encoded, axis=0, dtype=np.uint64), fraction_bits=BITS)
    rounded = np.rint(rows * 2**BITS).astype(np.int64).sum(0) / 2**BITS
    assert np.array_equal(total, rounded)
    assert np.abs(total - rows.sum(0)).max() <= 6 * 2.0 ** (-BITS - 1)
    for bad in (np.array([1e12]), np.array([np.nan]), np.array([np.inf])):
        with pytest.raises(ConfigError, match="64 bits"):
            encode(bad, fraction_bits=BITS, num_terms=6)


def numbers_of(name: str, size: int = 50) -> np.ndarray:
    draw = np.random.default_rng(list(name.encode()))
    return encode(draw.normal(0, 2, size), fraction_bits=BITS, num_terms=len(NAMES))


def run_round(*, no_shares: tuple[str, ...] = (), no_numbers: tuple[str, ...] = (), no_reveal: tuple[str, ...] = ()):
    """One round in which some clients leave before a phase; the masked numbers and the sum."""
    clients = {name: SecureClient(name, round_number=ROUND, threshold=THRESHOLD) for name in NAMES}
    keys = {name: one.public_keys() for name, one in clients.items()}
    shares = {name: one.shares(keys) for name, one in clients.items() if name not in no_shares}
    masked = {
        name: clients[name].masked(numbers_of(name), {o: shares[o][name] for o in shares if o != name})
        for name in shares
        if name not in no_numbers
    }
    alive, dropped = sorted(masked), sorted(shares.keys() - masked.keys())
    revealed = {name: clients[name].reveal(alive, dropped) for name in alive if name not in no_reveal}
    total = secure_total(masked, revealed, keys, list(shares), round_number=ROUND, threshold=THRESHOLD)
    return masked, total


@pytest.mark.parametrize(
    "leaving",
    [
        {},
        {"no_numbers": ("cem",)},
        {"no_numbers": ("ann", "eva")},
        {"no_shares": ("ben",)},
        {"no_shares": ("ben",), "no_numbers": ("dia",)},
        {"no_reveal": ("ann", "dia")},
        {"no_numbers": ("eva",), "no_reveal": ("ben",)},
    ],
)
def test_the_sum_is_exact_whoever_leaves(leaving: dict) -> None:
    masked, total = run_round(**leaving)
    expected = np.sum([numbers_of(name) for name in masked], axis=0, dtype=np.uint64)
    assert np.array_equal(total, expected)
    for name, numbers in masked.items():  # no client's own numbers arrive
        assert not np.any(numbers == numbers_of(name))


@pytest.mark.parametrize(
    "leaving",
    [
        {"no_numbers": ("ann", "ben", "cem")},
        {"no_reveal": ("ann", "ben", "cem")},
        {"no_shares": ("ann", "ben", "cem")},
    ],
)
def test_fewer_than_the_threshold_are_refused(leaving: dict) -> None:
    with pytest.raises(ModelwrightError, match=r"2 clients .*3 are needed"):
        run_round(**leaving)


def test_a_client_reveals_nothing_that_uncovers_an_update() -> None:
    clients = {name: SecureClient(name, round_number=ROUND, threshold=THRESHOLD) for name in NAMES}
    keys = {name: one.public_keys() for name, one in clients.items()}
    shares = {name: one.shares(keys) for name, one in clients.items()}
    ann = clients["ann"]
    ann.masked(numbers_of("ann"), {other: shares[other]["ann"] for other in NAMES if other != "ann"})
    with pytest.raises(ModelwrightError, match="do not fit together"):
        ann.reveal(["ann", "ben", "cem", "dia"], ["dia", "eva"])
    with pytest.raises(ModelwrightError, match="do not fit together"):
        ann.reveal(["ann", "ben", "cem", "zoe"], [])
    with pytest.raises(ModelwrightError, match="2 clients are left"):
        ann.reveal(["ann", "ben"], ["cem", "dia", "eva"])
    assert set(ann.reveal(["ann", "ben", "cem"], ["dia", "eva"])["mask"]) == {"dia", "eva"}
    with pytest.raises(ModelwrightError, match="asks for shares twice"):
        ann.reveal(["ann", "ben", "dia"], ["cem", "eva"])


def test_changed_keys_and_shares_are_noticed() -> None:
    clients = {name: SecureClient(name, round_number=ROUND, threshold=THRESHOLD) for name in NAMES}
    keys = {name: one.public_keys() for name, one in clients.items()}
    with pytest.raises(ModelwrightError, match="another key for this client"):
        clients["ann"].shares({**keys, "ann": keys["ben"]})
    with pytest.raises(ModelwrightError, match="two clients have the same key"):
        clients["ann"].shares({**keys, "cem": keys["ben"]})
    shares = {name: one.shares(keys) for name, one in clients.items()}
    sealed = {other: shares[other]["ann"] for other in NAMES if other != "ann"}
    sealed["ben"] = sealed["ben"][:-2] + f"{int(sealed['ben'][-2:], 16) ^ 1:02x}"
    clients["ann"].masked(numbers_of("ann"), sealed)
    with pytest.raises(ModelwrightError, match="the share from ben is not authentic"):
        clients["ann"].reveal(list(NAMES), [])
