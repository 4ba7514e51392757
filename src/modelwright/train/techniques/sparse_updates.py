"""Sparse updates in training: what is selected before a step, what the step then skips, and its cost.

A technique and a model pass: projections get products that skip what is not selected, and blocks below the lowest
selected one run without gradient. `begin_step` selects, from the optimizer's moments and the rows of the batch;
everything that the selection depends on is in the state. Replicas have the same moments, so they select the same units.
"""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder
from modelwright.ops.flop_counter import Executed, counted
from modelwright.ops.linear_gemms import LinearGemms
from modelwright.ops.sparse_gemms import on_columns, on_rows
from modelwright.optim.sparse import BatchSelectionConfig, SparseUpdateConfig
from modelwright.optim.unit_selector import Selector, moment_signal
from modelwright.precision.apply import ModelPrecision
from modelwright.train.flops import attention_flops, head_flops
from modelwright.train.objective import Batch
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique, Update
from modelwright.train.techniques.batch_selection import BatchSelector

BLOCKS = "blocks"
"""The name of the selector of whole blocks."""


@dataclass(kw_only=True)
class SparseUpdates:
    """Created once all other passes have been applied. `sum_ranks`: sums a float over all ranks. send_rows: called at
    each selection with the rows of the gradients that there will be (`AllReduceSync.send_rows`), by parameter in order.
    chosen: by projection, the numbers of the selected outputs; None for all of them. first: the lowest block that is
    updated.
    """

    config: SparseUpdateConfig
    rows: BatchSelectionConfig
    model: Decoder
    optimizer: Optimizer
    betas: tuple[float, float]
    eps: float
    num_steps: int
    num_parts: int
    seed: int
    rank: int
    sum_ranks: Callable[[float], float]
    formats: ModelPrecision
    send_rows: Callable[[Sequence[Tensor | None]], None] | None = None
    executed: Executed = field(default_factory=Executed)
    selectors: dict[str, Selector] = field(default_factory=dict[str, Selector])
    chosen: dict[str, Tensor | None] = field(default_factory=dict[str, "Tensor | None"])
    first: int = 0
    share: float = 1.0
    row_choice: BatchSelector = field(init=False)

    def __post_init__(self) -> None:
        if self.config.kind in ("columns", "rows"):
            self.selectors = {
                name: self.selector(one.out_features, name) for name, one in self.model.projections().items()
            }
        elif self.config.kind == "layers":
            self.selectors = {BLOCKS: self.selector(len(self.model.blocks), BLOCKS)}
        self.row_choice = BatchSelector(
            self.rows,
            self.model,
            seed=self.seed,
            rank=self.rank,
            num_parts=self.num_parts,
            executed=self.executed,
        )
        self.install()

    def selector(self, num_units: int, name: str) -> Selector:
        config = self.config
        return Selector(
            num_units, seed=self.seed, name=name, regrowth=config.random_fraction, feedback=config.use_feedback
        )

    def install(self) -> None:
        """Make projections skip what is not selected, and blocks save nothing that backward does not reach."""
        self.formats.wrap_products(self.sparse_products)
        if self.config.freezes:
            for layer, block in enumerate(self.model.blocks.values()):
                block.forward = partial(self.run_block, layer, block.forward)

    def sparse_products(self, name: str, inner: LinearGemms) -> LinearGemms:
        """The GEMMs of a projection, in any format, without unselected units; FLOPs are counted after that."""
        leave_out = {"columns": on_columns, "rows": on_rows}.get(self.config.kind)
        products = counted(inner, self.executed)
        return leave_out(products, partial(self.chosen.get, name)) if leave_out else products

    def run_block(self, layer: int, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Blocks below the lowest updated one save nothing for backward."""
        if layer >= self.first:
            return run(*inputs)
        with torch.no_grad():
            return run(*inputs)

    def begin_step(self, batch: Batch, step: int) -> Batch:
        """Select for update `step`; returns the part of the batch that is trained on."""
        self.executed.flops = 0
        self.share = self.config.share(step, self.num_steps)
        if self.config.kind == "freeze_prefix":
            self.freeze({layer for layer in range(len(self.model.blocks)) if layer >= self.num_frozen()})
        elif self.config.kind != "none":
            if step % self.config.refresh_every_steps == 0:
                self.refresh(step)
            self.put_in_force()
        batch = self.row_choice(batch, step, self.num_steps) if self.rows.is_on else batch
        self.count_around(batch)
        return batch

    def num_frozen(self) -> int:
        """Blocks of the frozen prefix; the last one is never frozen."""
        num_blocks = len(self.model.blocks)
        return min(num_blocks - 1, round((1.0 - self.share) * num_blocks))

    def refresh(self, step: int) -> None:
        for name, selector in self.selectors.items():
            measured = None if self.config.signal == "random" else self.measure(name)
            selector.refresh(step, self.share, measured)

    def measure(self, name: str) -> Tensor:
        """The signal of each unit: the square root of the mean over its elements; infinite before its first update."""
        if name == BLOCKS:
            blocks = self.model.blocks.values()
            return torch.stack([self.root_mean([p for p in block.parameters() if p.dim() > 1]) for block in blocks])
        weight = self.model.projections()[name].weight
        result = self.elements(weight)
        return torch.full((weight.shape[0],), torch.inf) if result is None else result.mean(dim=1).sqrt().cpu()

    def root_mean(self, parameters: Sequence[Tensor]) -> Tensor:
        result = [self.elements(parameter) for parameter in parameters]
        sums = [one.double().sum() for one in result if one is not None]
        if not sums:
            return torch.tensor(torch.inf)
        mean = torch.stack(sums).sum() / sum(one.numel() for one in result if one is not None)
        return mean.sqrt().float().cpu()

    def elements(self, parameter: Tensor) -> Tensor | None:
        signal = "momentum" if self.config.signal == "momentum" else "gradient"
        return moment_signal(self.optimizer.state.get(parameter, {}), signal, self.betas, self.eps)

    def put_in_force(self) -> None:
        """Make the next step skip what the selectors have not selected."""
        for name, selector in self.selectors.items():
            everything = bool(selector.chosen.all())
            if name == BLOCKS:
                self.freeze(set(selector.indices().tolist()))
            else:
                device = self.model.embedding.weight.device
                self.chosen[name] = None if everything else selector.indices().to(device)
        if self.send_rows and self.config.kind in ("columns", "rows"):
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            self.send_rows([self.chosen.get(name.removesuffix(".weight")) for name in names])

    def freeze(self, updated: set[int]) -> None:
        """Update only these blocks and everything above them. An embedding that is also the head stays with the head;
        below a frozen block no gradient reaches it.
        """
        self.first = min(updated)
        for layer, block in enumerate(self.model.blocks.values()):
            block.requires_grad_(layer in updated)
        if self.model.head is not None:
            self.model.embedding.requires_grad_(self.first == 0)

    def count_around(self, batch: Batch) -> None:
        """FLOPs that projections do not count themselves: attention and head, forward and backward."""
        shape = self.model.config
        of_attention = [attention_flops(shape, batch, int(layer)) for layer in self.model.blocks]
        self.executed.add(sum(of_attention) + 2 * sum(of_attention[self.first :]))
        self.executed.add(3 * head_flops(shape, batch))

    def on_gradients(self, update: Update) -> None:
        """After backward: the cost of the step, and the selected share."""
        update.model_flops = update.metrics["executed_flops"] = self.sum_ranks(float(self.executed.flops))
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
        self.formats.wrap_products(None)
        if self.config.freezes:
            self.model.requires_grad_(True)


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
    sparse = SparseUpdates(
        config=config,
        rows=rows,
        model=run.model,
        optimizer=run.replica.optimizer,
        betas=betas,
        eps=eps,
        num_steps=run.num_steps,
        num_parts=num_microbatches,
        seed=run.seed,
        rank=run.mesh.data.rank,
        sum_ranks=lambda value: run.mesh.world.sums([value])[0],
        formats=run.formats,
        send_rows=lambda rows: run.strategy.send_only_rows(rows),
    )
    run.on_exit.callback(sparse.close)
    return Technique(
        name="layer_sparsity",
        on_batch=lambda step, batch: sparse.begin_step(batch, step),
        on_gradients=sparse.on_gradients,
        state=sparse,
        needs=frozenset(),
    )
