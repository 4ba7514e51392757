"""Where the last few tokens of a text occurred in it before."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

LONGEST_MATCH = 4
SHORTEST_MATCH = 2
"""How many last tokens are looked up, the longest match first. One token alone recurs too often to say what follows."""


@dataclass
class NgramIndex:
    """Where each run of `SHORTEST_MATCH` to `LONGEST_MATCH` tokens was last followed by another token."""

    num_indexed: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The index of the token that followed, by the run before it."""

    def extend(self, token_ids: Ids[int]) -> None:
        """Take note of the tokens since the last call; token_ids: all of the sequence."""
        for place in range(self.num_indexed, len(token_ids)):
            for length in range(SHORTEST_MATCH, min(LONGEST_MATCH, place) + 1):
                self.places[tuple(token_ids[place - length : place])] = place
        self.num_indexed = len(token_ids)

    def guess(self, token_ids: Ids[int], count: int) -> list[int]:
        """`count` tokens that may come next, none if the last tokens have not occurred before. A match that reaches the
        end goes on with the guesses themselves, as text that repeats does.
        """
        for length in range(min(LONGEST_MATCH, len(token_ids)), SHORTEST_MATCH - 1, -1):
            start = self.places.get(tuple(token_ids[len(token_ids) - length :]))
            if start is not None:
                guesses = list(token_ids[start : start + count])
                while len(guesses) < count:
                    guesses.append(guesses[len(guesses) - (len(token_ids) - start)])
                return guesses
        return []
