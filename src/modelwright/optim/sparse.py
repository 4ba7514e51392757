"""What a person chooses about sparse updates: which units of the model are updated, which rows of a batch are learned.

What is not chosen is not computed. Knows no model and no rank.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from modelwright.core.compatibility import (
    ADAMW_STATES,
    EAGER_BLOCKS,
    EQUAL_REPLICAS,
    EXACT_SUMS,
    PROMPT_GRADIENTS,
    RESIDENT_STATES,
    REVERSIBLE_UPDATES,
    SAME_MATMULS,
    SAME_UNITS,
    SYNCHRONOUS_UPDATES,
    WHOLE_GRADIENTS,
    WHOLE_MODEL,
    Feature,
    feature,
)
from modelwright.core.errors import ConfigError

UnitKind = Literal["none", "columns", "rows", "prefix", "layers"]
Course = Literal["constant", "dense_first", "sparse_first"]


@dataclass(frozen=True, kw_only=True)
class RowChoiceConfig:
    """Which rows of each batch go through the model; the others are looked at and left out.

    signal: what a row is worth, from its first `probe_len` tokens: `loss`, the present one; `change`, how far the loss
    has moved, up or down, since the run began (what is being learned, and what is being forgotten); `random`, the
    baseline, which needs no look; none, all rows are learned. keep: the share of the rows that are learned;
    explore: the share of these that is drawn at random from all others, so that no kind of row is left out for ever;
    dense_share: the share of the run, at its beginning, in which all rows are learned. keep_tokens: the share of the
    labels in the chosen rows that are learned, those of the tokens that receive most attention in the first layer
    (fewer labels mean a smaller head; 1 keeps them all). The gradient is that of the mean over what is chosen: with
    any signal but `random` it is biased towards it.

    max_start_loss: once `dense_share` is over, rows that the weights with which the run began predict worse than this
    are never learned, and fewer than `keep` are where too few are left. In units of the logarithm of the vocabulary,
    the loss of a guess: 1 leaves out what trained weights cannot even guess, as garbage in a stream that nobody has
    cleaned, and for good: a filter, beyond which `explore` does not draw. 0 sets no limit, as is right where the new
    text is of a kind that the first weights know nothing of, and in a run from scratch, whose weights guess everywhere.
    Source: a filter by perplexity (Wenzek et al. 2019, CCNet, https://arxiv.org/abs/1911.00359), by the model itself.
    """

    signal: Literal["none", "loss", "change", "random"] = "none"
    keep: float = 0.4
    probe_len: int = 32
    explore: float = 0.25
    dense_share: float = 0.0
    max_start_loss: float = 0.0
    keep_tokens: float = 1.0

    def __post_init__(self) -> None:
        for name in ("keep", "keep_tokens"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}: must be above 0 and at most 1, got {getattr(self, name)}; 1 keeps all")
        if not 0.0 <= self.explore <= 1.0:
            raise ConfigError(f"explore: must be from 0 to 1, got {self.explore}; 0.25 draws a quarter at random")
        if not 0.0 <= self.dense_share < 1.0:
            raise ConfigError(f"dense_share: must be at least 0 and below 1, got {self.dense_share}")
        if not 0.0 <= self.max_start_loss < math.inf:
            raise ConfigError(
                f"max_start_loss: must be at least 0, got {self.max_start_loss}; 1 is the loss of a guess"
            )
        if self.max_start_loss and self.signal == "none":
            raise ConfigError("max_start_loss: needs a signal; random with keep 1 leaves out nothing else")
        if self.probe_len < 2:
            raise ConfigError(f"probe_len: must be at least 2 tokens, got {self.probe_len}; 32 is usual")

    @property
    def needs_start(self) -> bool:
        """Whether the weights with which the run began are kept."""
        return self.signal == "change" or self.max_start_loss > 0

    def num_chosen(self, num_rows: int, num_parts: int) -> int:
        """Of a rank's rows, at most; `num_parts` microbatches share them equally, each at least one.

        Raises `ConfigError` where that is all of the rows, so that there is nothing to choose.
        """
        chosen = max(1, round(self.keep * num_rows / num_parts)) * num_parts
        if chosen > num_rows or (chosen == num_rows and self.keep < 1.0):
            fewer = "set num_microbatches to 1" if num_parts > 1 else "lower it"
            raise ConfigError(
                f"sparse.batch.keep: of {num_rows} rows on a rank, {self.keep:g} in {num_parts} equal microbatches are "
                f"all; {fewer}, or take more rows or fewer copies of the model"
            )
        return chosen


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Which units of the model each update changes, and on which rows of the batch.

    kind: `columns`, outputs of every projection: both backward products take the chosen ones only, which makes the
    gradient that goes on downwards an approximation; `rows`, the same units, but only the weight's gradient is
    shortened; `layers`, whole blocks: backward ends at the lowest chosen one; `prefix`, the upper blocks: all below
    are frozen, in order; none. keep: the share of the units that are chosen. course: `constant`; `dense_first` or
    `sparse_first`: all units in the first or the last `ramp` of the run, on a straight line from or to `keep`.

    refresh_every: steps after which the choice is made anew (of all kinds but prefix), by `signal`, which is read from
    the optimizer's moments: `gradient`, the root mean square of a unit's gradients; `momentum`, how much of them points
    the same way; `random`, the baseline. regrowth: the share of the chosen that is drawn at random from all others;
    feedback: a unit's signal counts once more for every choice that has passed it over, as what it has missed adds up.

    What is not chosen: a frozen block keeps weights and moments as they are, without decay, and nothing of it is sent;
    a row or column that is not chosen has gradient zero, which exact sums do not send; its momentum carries it on and
    fades, and decay holds.
    """

    kind: UnitKind = "none"
    keep: float = 0.5
    course: Course = "constant"
    ramp: float = 0.2
    refresh_every: int = 20
    signal: Literal["gradient", "momentum", "random"] = "gradient"
    regrowth: float = 0.25
    feedback: bool = True
    batch: RowChoiceConfig = field(default_factory=RowChoiceConfig)

    def __post_init__(self) -> None:
        if not 0.0 < self.keep <= 1.0:
            raise ConfigError(f"keep: must be above 0 and at most 1, got {self.keep}; 1 keeps all")
        if not 0.0 < self.ramp <= 1.0:
            raise ConfigError(f"ramp: must be above 0 and at most 1, got {self.ramp}; 0.2 is a fifth of the run")
        if self.refresh_every < 1:
            raise ConfigError(f"refresh_every: must be at least 1 step, got {self.refresh_every}; 20 is usual")
        if not 0.0 <= self.regrowth <= 1.0:
            raise ConfigError(f"regrowth: must be from 0 to 1, got {self.regrowth}; 0.25 draws a quarter at random")

    @property
    def freezes(self) -> bool:
        """Whether whole blocks are left out of the update."""
        return self.kind in ("prefix", "layers")

    @property
    def chooses_rows(self) -> bool:
        """Whether something happens to the batch before it is learned."""
        return self.batch.signal != "none" or self.batch.keep_tokens < 1.0

    @property
    def is_on(self) -> bool:
        return self.kind != "none" or self.chooses_rows

    def features(self) -> list[Feature]:
        """What this needs of a run, and takes away: choosing units needs more than choosing rows."""
        needs = {EAGER_BLOCKS, SYNCHRONOUS_UPDATES, PROMPT_GRADIENTS, SAME_MATMULS, WHOLE_GRADIENTS, WHOLE_MODEL}
        units = {ADAMW_STATES, RESIDENT_STATES, EXACT_SUMS, EQUAL_REPLICAS}
        found = []
        if self.kind != "none":
            found.append(feature("kind", self.kind, needs=needs | units, breaks=[REVERSIBLE_UPDATES, SAME_UNITS]))
        if self.chooses_rows:
            found.append(feature("batch", needs=needs, breaks=[REVERSIBLE_UPDATES]))
        return found

    def share(self, step: int, num_steps: int) -> float:
        """The share of the units that update `step` (from 0) chooses."""
        if self.course == "constant":
            return self.keep
        done = step / num_steps
        sparse = done / self.ramp if self.course == "dense_first" else (1.0 - done) / self.ramp
        return 1.0 - (1.0 - self.keep) * min(1.0, sparse)
