"""Sparse updates in training: selects units (outputs, blocks) and rows before a step, whose backward skips the others.

A technique and a model pass: projections get products that skip unselected outputs, and blocks below the lowest
selected one run without gradient. `begin_step` selects, from the optimizer's moments and the rows of the batch;
everything that the selection depends on is in the state. Replicas have the same moments, so they select the same units.

Backward products are smaller dense products, not masked ones: of dy [N, O] only the selected columns S are multiplied.
Kind `columns` shrinks both backward products (the gradient of the input is then an approximation); kind `rows` shrinks
only the gradient of the weight, which is exact in the selected rows and zero elsewhere. Unselected parts are never
computed, so there is no remainder to keep; the selector compensates for it. Legend: N flattened rows, I inputs, O
outputs, S selected outputs.

`Selector` takes the units with the strongest signals, and some of all others, so that none is excluded for good. The
signal of a unit that is not selected dates from its last selection. It would never change, and a unit that was weak
once would be excluded forever (as with a published mask that is repeatedly multiplied by the next one).
Two mechanisms bring it back: every selection that skips it adds its signal once more, because missed updates
accumulate, and a share of the slots is drawn at random from all units that have none.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from modelwright.core import compatibility as traits
from modelwright.core.config import ConfigError, constant, derive_seed, only_for
from modelwright.ops.matmul import Executed, LinearGemms, counted
from modelwright.train.objective import Batch
from modelwright.train.technique import Runtime, Technique, Update
from modelwright.train.techniques.batch_selection import BatchSelectionConfig, BatchSelector
from modelwright.train.work import attention_flops, head_flops

UnitKind = Literal["none", "columns", "rows", "freeze_prefix", "layers"]
DensitySchedule = Literal["constant", "dense_first", "sparse_first"]


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
    density_schedule: DensitySchedule = constant("constant")
    """`constant`, or all units in the first (`dense_first`) or last (`sparse_first`) part of the run, on a linear ramp
    from or to `keep_fraction`."""
    signal: Literal["gradient", "momentum", "random"] = constant("gradient")
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


def sparsity_features(units: SparseUpdateConfig, rows: BatchSelectionConfig) -> list[traits.Feature]:
    """Features of sparse updates and batch selection, with their requirements. Selecting units needs more."""
    needs = {
        traits.EAGER_BLOCKS,
        traits.SYNCHRONOUS_UPDATES,
        traits.PROMPT_GRADIENTS,
        traits.SAME_MATMULS,
        traits.WHOLE_GRADIENTS,
        traits.WHOLE_MODEL,
    }
    whole = {
        traits.ADAMW_STATES,
        traits.RESIDENT_STATES,
        traits.EXACT_SUMS,
        traits.EQUAL_REPLICAS,
        traits.TRAINED_WEIGHTS,
    }
    result = list[traits.Feature]()
    if units.kind != "none":
        breaks = [traits.REVERSIBLE_UPDATES, traits.SAME_UNITS]
        result.append(traits.feature("sparse_updates.kind", units.kind, needs=needs | whole, breaks=breaks))
    if rows.is_on:
        result.append(traits.feature("batch_selection.signal", needs=needs, breaks=[traits.REVERSIBLE_UPDATES]))
    return result


class Selector:
    """Selects among `num_units`. Units without a signal come before all others, in random order."""

    def __init__(self, num_units: int, *, seed: int, name: str, regrowth: float, feedback: bool) -> None:
        self.seed = seed
        self.name = name
        self.regrowth = regrowth
        self.feedback = feedback
        self.signals = torch.full((num_units,), math.inf)
        self.passed_over = torch.zeros(num_units)
        self.chosen = torch.ones(num_units, dtype=torch.bool)

    def refresh(self, step: int, share: float, measured: Tensor | None) -> Tensor:
        """Select anew; returns the numbers of the selected units, in increasing order. measured: signals [num_units],
        of which those of the present selection are used; None selects at random.
        """
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "units", self.name, step))
        num_units = len(self.signals)
        places = max(1, round(share * num_units))
        order = torch.randperm(num_units, generator=draw)  # units that are worth the same come in random order
        if measured is None:
            units = order[:places]
        else:
            fresh = self.chosen & measured.isfinite()
            self.signals = torch.where(fresh, measured.to(self.signals), self.signals)
            worth = self.signals * (1.0 + self.passed_over) if self.feedback else self.signals
            # Units without a signal come first, but with a finite worth: infinity times a factor tells nothing apart.
            worth = torch.where(worth.isinf(), torch.full_like(worth, torch.finfo(worth.dtype).max), worth)
            order = order[worth[order].argsort(descending=True, stable=True)]
            num_drawn = min(round(self.regrowth * places), num_units - places)
            rest = order[places - num_drawn :]
            drawn = rest[torch.randperm(len(rest), generator=draw)[:num_drawn]]
            units = torch.cat([order[: places - num_drawn], drawn])
        self.chosen = torch.zeros_like(self.chosen).index_fill_(0, units, True)
        self.passed_over = torch.where(self.chosen, torch.zeros_like(self.passed_over), self.passed_over + 1.0)
        return self.indices()

    def indices(self) -> Tensor:
        """The present selection, in increasing order."""
        return self.chosen.nonzero()[:, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"signals": self.signals, "passed_over": self.passed_over, "chosen": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.signals, self.passed_over, self.chosen = (
            state[name].clone() for name in ("signals", "passed_over", "chosen")
        )


Signal = Literal["gradient", "momentum"]


def moment_signal(state: dict[str, Any], signal: Signal, betas: tuple[float, float], eps: float) -> Tensor | None:
    """Signal per element of a parameter, from its Adam state; None before its first update. `gradient`: the squared
    gradient, as a running average; `momentum`: the squared share of the gradients that points one way, m^2 / v, 1 if
    all gradients were equal and near 0 if they are noise. Both with Adam's bias correction.
    """
    if "exp_avg_sq" not in state or not float(state["step"]):
        return None
    num_updates = float(state["step"])
    square = state["exp_avg_sq"] / (1.0 - betas[1] ** num_updates)
    if signal == "gradient":
        return square
    mean = state["exp_avg"] / (1.0 - betas[0] ** num_updates)
    return mean.square() / (square + eps * eps)


Chosen = Callable[[], Tensor | None]
"""Returns the numbers of the presently selected outputs, int64 [S] in rising order; None for all."""


def on_rows(inner: LinearGemms, chosen: Chosen) -> LinearGemms:
    """Like `inner`, but the weight's gradient is computed in its selected rows only."""

    def wgrad(dy_NO: Tensor, x_NI: Tensor) -> Tensor:
        rows_S = chosen()
        if rows_S is None:
            return inner.wgrad(dy_NO, x_NI)
        part_SI = inner.wgrad(dy_NO.index_select(1, rows_S), x_NI)
        return part_SI.new_zeros(dy_NO.shape[1], part_SI.shape[1]).index_copy_(0, rows_S, part_SI)

    return replace(inner, name=f"{inner.name}, chosen rows", wgrad=wgrad)


def on_columns(inner: LinearGemms, chosen: Chosen) -> LinearGemms:
    """Like `on_rows`, and the input's gradient uses the selected columns of dy only."""

    def dgrad(dy_NO: Tensor, weight_OI: Tensor) -> Tensor:
        columns_S = chosen()
        if columns_S is None:
            return inner.dgrad(dy_NO, weight_OI)
        return inner.dgrad(dy_NO.index_select(1, columns_S), weight_OI.index_select(0, columns_S))

    return replace(on_rows(inner, chosen), name=f"{inner.name}, chosen columns", dgrad=dgrad)


def masked_naive(inner: LinearGemms, chosen: Chosen, *, input_too: bool) -> LinearGemms:
    """The reference for both: whole products of a dy in which the other columns are zero. Saves nothing."""

    def masked(dy_NO: Tensor) -> Tensor:
        columns_S = chosen()
        if columns_S is None:
            return dy_NO
        return dy_NO * torch.zeros(dy_NO.shape[1], dtype=dy_NO.dtype).index_fill_(0, columns_S, 1.0)

    def dgrad(dy_NO: Tensor, weight: Tensor) -> Tensor:
        return inner.dgrad(masked(dy_NO) if input_too else dy_NO, weight)

    def wgrad(dy_NO: Tensor, x: Tensor) -> Tensor:
        return inner.wgrad(masked(dy_NO), x)

    return replace(inner, name="masked", dgrad=dgrad, wgrad=wgrad)


BLOCKS = "blocks"
"""The name of the selector of whole blocks."""


@dataclass(kw_only=True)
class SparseUpdates:
    """Restricts each step to selected units and rows. Created once all other passes have been applied. num_parts:
    microbatches. chosen: by projection, the numbers of the selected outputs; None for all of them. first: the lowest
    block that is updated.
    """

    config: SparseUpdateConfig
    rows: BatchSelectionConfig
    run: Runtime
    betas: tuple[float, float]
    eps: float
    num_parts: int
    executed: Executed = field(default_factory=Executed)
    selectors: dict[str, Selector] = field(default_factory=dict[str, Selector])
    chosen: dict[str, Tensor | None] = field(default_factory=dict[str, "Tensor | None"])
    first: int = 0
    share: float = 1.0
    row_choice: BatchSelector = field(init=False)

    def __post_init__(self) -> None:
        model, seed, rank = self.run.model, self.run.seed, self.run.mesh.data.rank
        units: dict[str, int] = {}
        if self.config.kind in ("columns", "rows"):
            units = {name: one.out_features for name, one in model.projections().items()}
        elif self.config.kind == "layers":
            units = {BLOCKS: len(model.blocks)}
        regrowth, feedback = self.config.random_fraction, self.config.use_feedback
        self.selectors = {
            name: Selector(num_units, seed=seed, name=name, regrowth=regrowth, feedback=feedback)
            for name, num_units in units.items()
        }
        self.row_choice = BatchSelector(
            self.rows, model, seed=seed, rank=rank, num_parts=self.num_parts, executed=self.executed
        )
        self.run.formats.wrap_products(self.sparse_products)
        if self.config.freezes:
            for layer, block in enumerate(model.blocks.values()):
                block.forward = partial(self.run_block, layer, block.forward)

    def sparse_products(self, name: str, inner: LinearGemms) -> LinearGemms:
        """The GEMMs of a projection, in any format, without unselected units; only executed FLOPs are counted."""
        leave_out = {"columns": on_columns, "rows": on_rows}.get(self.config.kind)
        products = counted(inner, self.executed)
        return leave_out(products, partial(self.chosen.get, name)) if leave_out else products

    def run_block(self, layer: int, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        if layer >= self.first:
            return run(*inputs)
        with torch.no_grad():  # backward does not reach the block, so it saves nothing
            return run(*inputs)

    def begin_step(self, step: int, batch: Batch) -> Batch:
        """Select for update `step`; returns the part of the batch that is trained on."""
        self.executed.flops = 0
        model, num_steps = self.run.model, self.run.num_steps
        self.share = self.config.share(step, num_steps)
        num_blocks = len(model.blocks)
        if self.config.kind == "freeze_prefix":
            num_frozen = min(num_blocks - 1, round((1.0 - self.share) * num_blocks))  # the last one is never frozen
            self.freeze(set(range(num_frozen, num_blocks)))
        elif self.config.kind != "none":
            if step % self.config.refresh_every_steps == 0:
                for name, selector in self.selectors.items():
                    measured = None if self.config.signal == "random" else self.measure(name)
                    selector.refresh(step, self.share, measured)
            device = model.embedding.weight.device
            for name, selector in self.selectors.items():
                if name == BLOCKS:
                    blocks: list[int] = selector.indices().tolist()  # pyright: ignore
                    self.freeze(set(blocks))
                else:
                    self.chosen[name] = None if selector.chosen.all() else selector.indices().to(device)
            if self.config.kind in ("columns", "rows"):
                # The other rows of these gradients are zero on all ranks, so they need not be sent.
                names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
                self.run.strategy.send_only_rows([self.chosen.get(name.removesuffix(".weight")) for name in names])
        batch = self.row_choice(batch, step, num_steps) if self.rows.is_on else batch
        # Projections count their own FLOPs; attention and head, forward and backward, are counted here.
        of_attention = [attention_flops(model.config, batch, int(layer)) for layer in model.blocks]
        self.executed.add(sum(of_attention) + 2 * sum(of_attention[self.first :]))
        self.executed.add(3 * head_flops(model.config, batch))
        return batch

    def measure(self, name: str) -> Tensor:
        """The signal of each unit: the square root of the mean over its elements; infinite before its first update."""
        if name != BLOCKS:
            weight = self.run.model.projections()[name].weight
            result = self.elements(weight)
            return torch.full((weight.shape[0],), torch.inf) if result is None else result.mean(dim=1).sqrt().cpu()
        signals: list[Tensor] = []
        for block in self.run.model.blocks.values():
            moments = [self.elements(parameter) for parameter in block.parameters() if parameter.dim() > 1]
            measured = [one for one in moments if one is not None]
            if measured:
                total = torch.stack([one.double().sum() for one in measured]).sum()
                signals.append((total / sum(one.numel() for one in measured)).sqrt().float().cpu())
            else:
                signals.append(torch.tensor(torch.inf))
        return torch.stack(signals)

    def elements(self, parameter: Tensor) -> Tensor | None:
        signal = "momentum" if self.config.signal == "momentum" else "gradient"
        return moment_signal(self.run.replica.optimizer.state.get(parameter, {}), signal, self.betas, self.eps)

    def freeze(self, updated: set[int]) -> None:
        """Update only these blocks and everything above them."""
        self.first, model = min(updated), self.run.model
        for layer, block in enumerate(model.blocks.values()):
            block.requires_grad_(layer in updated)
        # An embedding that is also the head is trained as the head is; another one gets no gradient below a frozen
        # block.
        if model.head is not None:
            model.embedding.requires_grad_(self.first == 0)

    def on_gradients(self, update: Update) -> None:
        """Record the cost of the step, and the selected share."""
        (executed_flops,) = self.run.mesh.world.sums([float(self.executed.flops)])
        update.model_flops = update.metrics["executed_flops"] = executed_flops
        update.metrics["sparse_share"] = self.share

    def state_dict(self) -> dict[str, Any]:
        selectors = {name: selector.state_dict() for name, selector in self.selectors.items()}
        return {"selectors": selectors, "row_choice": self.row_choice.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, selector in self.selectors.items():
            selector.load_state_dict(state["selectors"][name])
        self.row_choice.load_state_dict(state["row_choice"])

    def close(self) -> None:
        """Make the model plain again, with all parameters trainable."""
        self.run.formats.wrap_products(None)
        if self.config.freezes:
            self.run.model.requires_grad_(True)


def layer_sparsity(
    config: SparseUpdateConfig,
    rows: BatchSelectionConfig,
    run: Runtime,
    *,
    betas: tuple[float, float],
    eps: float,
    num_microbatches: int,
) -> Technique | None:
    """betas, eps: of the optimizer, whose moments drive the selection."""
    if config.kind == "none" and not rows.is_on:
        return None
    if not run.mesh.is_only_data_parallel:
        raise ConfigError(
            "sparse_updates: needs unsharded replicas; set all axes of `parallel` except data to 1 and zero_stage to 0"
        )
    sparse = SparseUpdates(config=config, rows=rows, run=run, betas=betas, eps=eps, num_parts=num_microbatches)
    run.on_exit.callback(sparse.close)
    return Technique(
        name="layer_sparsity",
        on_batch=sparse.begin_step,
        on_gradients=sparse.on_gradients,
        state=sparse,
        needs=frozenset(),
    )
