"""Settings of sparse updates: which units are updated and which rows are trained on; the rest is not computed."""

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
    TRAINED_WEIGHTS,
    WHOLE_GRADIENTS,
    WHOLE_MODEL,
    Feature,
    feature,
)
from modelwright.core.config import constant, only_for
from modelwright.core.errors import ConfigError

UnitKind = Literal["none", "columns", "rows", "freeze_prefix", "layers"]
DensitySchedule = Literal["constant", "dense_first", "sparse_first"]


@dataclass(frozen=True, kw_only=True)
class BatchSelectionConfig:
    """Online batch selection: trains on some rows of each batch. The others cost only a short forward pass.

    The gradient is that of the mean loss over the selected rows: biased toward them for every signal but `random`.
    """

    signal: Literal["none", "loss", "loss_change", "random"] = "none"
    """Value of a row, judged on its first `probe_tokens` tokens: `loss`; `loss_change`, the distance in either
    direction from its loss at the start of the run; `random`, the baseline; `none` trains on all rows."""
    keep_fraction: float = field(default=0.4, metadata=only_for("signal", "loss", "loss_change", "random"))
    """Fraction of the rows that are trained on."""
    probe_tokens: int = field(default=32, metadata=only_for("signal", "loss", "loss_change"))
    """Tokens of each row that the signal is measured on."""
    random_fraction: float = field(default=0.25, metadata=only_for("signal", "loss", "loss_change", "random"))
    """Fraction of the selected rows drawn at random, so that no kind of row is ignored forever."""
    max_initial_loss: float = 0.0
    """Never train on rows that the initial weights predict worse than this, in units of ln(vocabulary size), the loss
    of a uniform guess; 0 sets no limit. It filters garbage out of an uncleaned stream (CCNet's perplexity filter,
    Wenzek et al. 2019) and is useless from scratch."""
    keep_token_fraction: float = 1.0
    """Fraction of the labels in the selected rows that count in the loss: those of the tokens that receive the most
    attention in the first layer."""
    dense_fraction: float = constant(0.0)
    """Fraction of the run, at its start, that trains on all rows."""

    def __post_init__(self) -> None:
        for name in ("keep_fraction", "keep_token_fraction"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}: must be above 0 and at most 1, got {getattr(self, name)}; 1 selects all")
        if not 0.0 <= self.random_fraction <= 1.0:
            text = f"random_fraction: must be from 0 to 1, got {self.random_fraction}"
            raise ConfigError(f"{text}; 0.25 draws a quarter at random")
        if not 0.0 <= self.dense_fraction < 1.0:
            raise ConfigError(f"dense_fraction: must be at least 0 and below 1, got {self.dense_fraction}")
        if not 0.0 <= self.max_initial_loss < math.inf:
            text = f"max_initial_loss: must be at least 0, got {self.max_initial_loss}"
            raise ConfigError(f"{text}; 1 is the loss of a random guess")
        if self.max_initial_loss and self.signal == "none":
            text = "max_initial_loss: needs a signal"
            raise ConfigError(f"{text}; with signal random and keep_fraction 1 nothing else is excluded")
        if self.probe_tokens < 2:
            raise ConfigError(f"probe_tokens: must be at least 2 tokens, got {self.probe_tokens}; 32 is usual")

    @property
    def is_on(self) -> bool:
        """True if the batch is changed before it is trained on."""
        return self.signal != "none" or self.keep_token_fraction < 1.0

    @property
    def needs_start(self) -> bool:
        """True if the initial weights of the run are kept."""
        return self.signal == "loss_change" or self.max_initial_loss > 0

    def num_chosen(self, num_rows: int, num_parts: int) -> int:
        """Maximum number of selected rows of a rank; `num_parts` microbatches share them equally, at least one each.
        Raises `ConfigError` if that is all of the rows, so that nothing is left to select.
        """
        chosen = max(1, round(self.keep_fraction * num_rows / num_parts)) * num_parts
        if chosen > num_rows or (chosen == num_rows and self.keep_fraction < 1.0):
            fewer = "set gradient_accumulation_steps to 1" if num_parts > 1 else "lower it"
            raise ConfigError(
                f"batch_selection.keep_fraction: {self.keep_fraction:g} of {num_rows} rows on a rank, in "
                f"{num_parts} equal microbatches, selects all of them; {fewer}, or use more rows or fewer replicas"
            )
        return chosen


@dataclass(frozen=True, kw_only=True)
class SparseUpdateConfig:
    """Updates some units of the model in each update. The backward pass of the others is skipped.

    A frozen block keeps its weights and optimizer states, without decay, and its gradients are not sent. A row or
    column that is not selected has a zero gradient, which exact all-reduces do not send; momentum and decay still
    apply.
    """

    kind: UnitKind = "none"
    """`columns`: output columns of every projection, in both backward GEMMs (approximate gradients below); `rows`: the
    same units, but only in the weight-gradient GEMM (exact); `layers`: whole blocks; `freeze_prefix`: all blocks below
    a boundary; `none`."""
    keep_fraction: float = field(default=0.5, metadata=only_for("kind", "columns", "rows", "layers", "freeze_prefix"))
    """Fraction of the units that are updated."""
    density_schedule: DensitySchedule = field(
        default="constant", metadata=only_for("kind", "columns", "rows", "layers", "freeze_prefix")
    )
    """`constant`, or all units in the first (`dense_first`) or last (`sparse_first`) part of the run, on a linear ramp
    from or to `keep_fraction`."""
    signal: Literal["gradient", "momentum", "random"] = "gradient"
    """Ranking of units, from the optimizer's moments: `gradient`, root mean square gradient; `momentum`, the agreement
    of gradients in direction; `random`, the baseline."""
    ramp_fraction: float = constant(0.2)
    """Fraction of the run that the ramp of `density_schedule` takes."""
    refresh_every_steps: int = constant(20)
    """Steps between selections (all kinds but `freeze_prefix`)."""
    random_fraction: float = constant(0.25)
    """Fraction of the selected units drawn at random."""
    use_feedback: bool = constant(True)
    """Let a unit's score grow with every selection that passed it over."""

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_fraction <= 1.0:
            raise ConfigError(f"keep_fraction: must be above 0 and at most 1, got {self.keep_fraction}; 1 selects all")
        if not 0.0 < self.ramp_fraction <= 1.0:
            text = f"ramp_fraction: must be above 0 and at most 1, got {self.ramp_fraction}"
            raise ConfigError(f"{text}; 0.2 is a fifth of the run")
        if self.refresh_every_steps < 1:
            text = f"refresh_every_steps: must be at least 1 step, got {self.refresh_every_steps}"
            raise ConfigError(f"{text}; 20 is usual")
        if not 0.0 <= self.random_fraction <= 1.0:
            text = f"random_fraction: must be from 0 to 1, got {self.random_fraction}"
            raise ConfigError(f"{text}; 0.25 draws a quarter at random")

    @property
    def freezes(self) -> bool:
        """True if whole blocks are skipped in the update."""
        return self.kind in ("freeze_prefix", "layers")

    def share(self, step: int, num_steps: int) -> float:
        """The share of the units that update `step` (from 0) selects."""
        if self.density_schedule == "constant":
            return self.keep_fraction
        done = step / num_steps
        sparse = (
            done / self.ramp_fraction if self.density_schedule == "dense_first" else (1.0 - done) / self.ramp_fraction
        )
        return 1.0 - (1.0 - self.keep_fraction) * min(1.0, sparse)


def sparsity_features(units: SparseUpdateConfig, rows: BatchSelectionConfig) -> list[Feature]:
    """Features of sparse updates and batch selection, with their requirements. Selecting units needs more."""
    needs = {EAGER_BLOCKS, SYNCHRONOUS_UPDATES, PROMPT_GRADIENTS, SAME_MATMULS, WHOLE_GRADIENTS, WHOLE_MODEL}
    whole = {ADAMW_STATES, RESIDENT_STATES, EXACT_SUMS, EQUAL_REPLICAS, TRAINED_WEIGHTS}
    result = list[Feature]()
    if units.kind != "none":
        breaks = [REVERSIBLE_UPDATES, SAME_UNITS]
        result.append(feature("sparse_updates.kind", units.kind, needs=needs | whole, breaks=breaks))
    if rows.is_on:
        result.append(feature("batch_selection.signal", needs=needs, breaks=[REVERSIBLE_UPDATES]))
    return result
