"""Decodes on CUDA: the model's own forward pass over the paged cache, one CUDA graph for each number of rows.

A step of decoding is hundreds of kernels of a few microseconds, and starting each from the host takes longer than
running it; a graph starts all of them at once. So nothing in a step may depend on the host: block tables, positions and
tokens arrive in one buffer, and FlexAttention reads keys and values where they are (`ops/flex_attention.py`). Rows are
padded to the next captured number; padding writes to block 0, which no sequence has.

On a CPU, where tests compare it with the path of `model_runner`, the same step runs without a graph.

Legend: R rows, M blocks in the longest table, D model width.
"""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.config import ModelError
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.products import Product
from modelwright.infer.sequence import DecodeRow
from modelwright.model.decoder import AttentionSpec, Block, Decoder
from modelwright.ops.flex_attention import MIN_HEAD_DIM, fused_paged_attention, paged_block_mask
from modelwright.ops.matmul import triton_compiles

BLOCK_LEN = 64
"""Tokens in a cache block on CUDA: the kernel multiplies the keys of one block at a time."""
NUM_NUMBERS = 4
"""Token, position, length of the sequence and slot, in front of a row's block table in the buffer."""
NUM_WARM_UPS = 2
"""Passes before a capture: the first compiles kernels and allocates workspaces, which a capture must not."""


@dataclass(frozen=True)
class CapturedStep:
    """A step for R rows. staged: in pinned memory; graph: None on a CPU, where `compute` is called."""

    staged: Tensor
    inputs: Tensor
    hidden_RD: Tensor
    graph: "torch.cuda.CUDAGraph | None"


class GraphDecoder:
    """Decodes rows without an adapter of their own. Raises `ModelError` for a model that it does not compute. A weight
    may change in place in its lifetime, but not move. head: product that makes the logits; row_multiple: numbers of
    rows are padded to a multiple, and then to the next power of two times it.
    """

    prompt_len = 0
    """It computes none of a prompt, whose many tokens keep a GPU busy without it."""

    def __init__(self, model: Decoder, cache: PagedCache, head: Product, *, row_multiple: int) -> None:
        config = model.config
        refuse = [
            (cache.heads_first, "its cache is stored by blocks"),
            (config.head_dim >= MIN_HEAD_DIM, f"its heads are narrower than {MIN_HEAD_DIM}"),
            (all(type(block) is Block for block in model.blocks.values()), "its blocks are compiled or divided"),
        ]
        for holds, reason in refuse:
            if not holds:
                raise ModelError(reason)
        self._model, self._cache, self._head = model, cache, head
        self._row_multiple = row_multiple
        self._device = model.norm.weight.device
        self._table_len = math.ceil(config.max_seq_len / cache.block_len)
        self._steps: dict[int, CapturedStep] = {}
        self._pool: Any = None
        if self._device.type == "cuda":
            try:
                self._step(row_multiple)  # a model that cannot be captured is named now, not in its first answer
            except RuntimeError as error:
                raise ModelError(f"its step cannot be captured: {str(error).splitlines()[0]}") from error

    @torch.inference_mode()
    def hidden(self, rows: Rows[DecodeRow]) -> Tensor:
        """Hidden states [N, D] of tokens of decoding sequences; writes their keys and values into the cache."""
        num_rows = self._row_multiple * 2 ** math.ceil(math.log2(max(1.0, len(rows) / self._row_multiple)))
        step = self._step(num_rows)
        numbers: list[list[int]] = []
        for row in rows:
            sequence, at, block_len = row.sequence, row.position, self._cache.block_len
            table = sequence.block_table
            slot = table[at // block_len] * block_len + at % block_len
            length = max(sequence.num_prefill, at + 1)  # when the token was first computed, as in `model_runner`
            unused = [0] * (self._table_len - len(table))
            numbers.append([sequence.token_at(at), at, length, slot, *table, *unused])
        # The copy of the step before is over: its results were read to choose tokens
        step.staged.copy_(torch.tensor(numbers + self._padding(num_rows - len(rows))))
        step.inputs.copy_(step.staged, non_blocking=True)
        if step.graph is None:
            return self._compute(step.inputs)[: len(rows)]
        step.graph.replay()
        return step.hidden_RD[: len(rows)].clone()  # the next replay writes there

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V]."""
        return self._head(F.pad(hidden_ND, (0, 0, 0, -len(hidden_ND) % self._row_multiple)))[: len(hidden_ND)]

    def _padding(self, num_rows: int) -> list[list[int]]:
        return [[0, 0, 1] + [0] * (1 + self._table_len)] * num_rows

    @torch.inference_mode()
    def _step(self, num_rows: int) -> CapturedStep:
        if num_rows in self._steps:
            return self._steps[num_rows]
        on_cuda = self._device.type == "cuda"
        staged = torch.tensor(self._padding(num_rows), pin_memory=on_cuda)
        inputs = staged.to(self._device)
        graph, hidden_RD = None, inputs
        if on_cuda:
            beside = torch.cuda.Stream(self._device)
            beside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(beside):
                for _ in range(NUM_WARM_UPS):
                    self._compute(inputs)
            torch.cuda.current_stream(self._device).wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            # One pool, because graphs never run at once; other threads of a server may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden_RD = self._compute(inputs)
            self._pool = graph.pool()
        self._steps[num_rows] = CapturedStep(staged, inputs, hidden_RD, graph)
        return self._steps[num_rows]

    def _compute(self, inputs: Tensor) -> Tensor:
        cache, model = self._cache, self._model
        tokens_R, positions_R, lengths_R, slots_R = inputs[:, :NUM_NUMBERS].unbind(dim=1)
        num_blocks = cache.layer(0)[0].shape[0]
        masks = {
            window: paged_block_mask(inputs[:, NUM_NUMBERS:], positions_R, num_blocks, cache.block_len, window)
            for window in model.config.windows
        }

        def attend(spec: AttentionSpec, q_1RHd: Tensor, k_1RKd: Tensor, v_1RKd: Tensor) -> Tensor:
            cache.write(spec.layer, slots_R, k_1RKd[0], v_1RKd[0])
            keys, values = (stored.transpose(0, 1) for stored in cache.layer(spec.layer))
            return fused_paged_attention(q_1RHd[0], keys, values, masks[spec.window], spec.soft_cap)[None]

        return model(tokens_R[None], positions_R[None], attend, lengths_R[None])[0]


def graph_decoder(
    model: Decoder, cache: PagedCache, head: Product, row_multiple: int
) -> tuple[GraphDecoder | None, str]:
    """Returns the decoder, or None and the reason why PyTorch's operators decode this model one by one."""
    if not triton_compiles():
        return None, "Triton compiles no kernels on this machine"
    try:
        return GraphDecoder(model, cache, head, row_multiple=row_multiple), ""
    except ModelError as error:
        return None, str(error)
