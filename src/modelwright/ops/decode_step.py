"""A decode step of a whole decoder as one call of a kernel for CPUs (`kernels/decode.h`): the newest token of each
sequence through all layers, with keys and values in a paged cache.

Weights are FP32, BF16, INT8 or codes of four bits in their stored layout; nothing is packed or copied. Everything is
computed in FP32. The result of a row has the same bits for any number of rows and threads. INT8 weights [-64, 64] take
INT8 activations with one scale per token, as `compress/int8.py` defines it; 4-bit weights take FP32
activations or such INT8 ones.

Legend: N rows, D model width, K key/value heads, d head width, O outputs, I inputs, P groups of an output's inputs, L
cache blocks, S tokens of one.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from modelwright.ops import cpu_kernels

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
"""The kernel's numbers for the formats of weights; bytes hold two codes of four bits each."""
UNENCODED = frozenset({FORMATS[torch.float32], FORMATS[torch.bfloat16]})
"""Formats that multiply activations in FP32, without INT8 codes."""
FOUR_BITS_BY_CODES = 4
"""The kernel's number for 4-bit weights whose activations are INT8."""
GROUP_STEP = 32
"""Divisor of the number of inputs in a group of 4-bit codes."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
Rotation = Literal["none", "global", "window"]
ROTATIONS: dict[Rotation, int] = {"none": 0, "global": 1, "window": 2}
LARGEST_CODE = 127.0
PARTS = ("projections", "heads", "attention", "feed-forward", "norms")
"""Parts of a step that are timed: products of attention; norms and rotations of queries and keys, and writing the
cache; scores, softmax and sums of values; products of the feed-forward layer, with its activation; and the rest: norms,
gates, sums of the residual stream, codes of activations.
"""


# These structures have the fields of those in `kernels/linear.h` and `kernels/decode.h`, in the same order.
class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "step", "zero")),
        *((name, ctypes.c_int64) for name in ("groups", "group")),
        *((name, ctypes.c_void_p) for name in ("row_sum", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "format")),
    ]


MATRICES = ("q", "k", "v", "output_gate", "head_router", "o", "gate", "up", "down")
NORMS = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm", "q_norm", "k_norm")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in (*NORMS, "keys", "values")),
        *((name, ctypes.c_int64) for name in ("window", "rotation")),
    ]


SIZES = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")
FACTORS = ("eps", "soft_cap", "score_scale", "embedding_scale")


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p),
        ("embedding", _Matrix),
        *((name, ctypes.c_int64) for name in ("num_layers", "width", *SIZES, "ffn_width")),
        *((name, ctypes.c_int64) for name in ("activation", "cache_format", "block_len")),
        *((name, ctypes.c_float) for name in FACTORS),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "rope_rows", "first_block", "blocks")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "window_cos", "window_sin")),
        *((name, ctypes.c_int64) for name in ("num_rows", "longest")),
    ]


@dataclass(frozen=True)
class Weight:
    """A linear layer: weight [O, I]; the scales of INT8 rows and the FP32 bias, [O] each, empty without."""

    weight_OI: Tensor
    scale_O: Tensor = field(default_factory=lambda: torch.empty(0))
    bias_O: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        num_outputs, num_inputs = self.weight_OI.shape
        return num_outputs, num_inputs

    @property
    def format(self) -> int:
        """The kernel's number of the format."""
        return FORMATS[self.weight_OI.dtype]

    def matrix(self, divisor: float) -> tuple[_Matrix, list[Tensor]]:
        """The kernel's description and the tensors that it points to. divisor: divides the scales."""
        scale_O, row_sum_O = self.scale_O, torch.empty(0)
        if self.weight_OI.dtype == torch.int8:
            # Sums of the rows: the products run on unsigned activations, shifted by 128.
            scale_O = (scale_O.float() / divisor).contiguous()
            row_sum_O = self.weight_OI.sum(dim=1, dtype=torch.int32)
        held = [self.weight_OI.detach(), scale_O, torch.empty(0), row_sum_O, self.bias_O.detach()]
        weight, step, zero, row_sum, bias = map(_pointer_to, held)
        return _Matrix(weight, step, zero, 1, self.shape[1], row_sum, bias, *self.shape, self.format), held


@dataclass(frozen=True, kw_only=True)
class FourBitWeight:
    """A linear layer over codes of four bits, two to a byte as `compress/int8.py` packs them, [O, I / 2
    rounded up]. step_OP, zero_OP: of groups, which divide the inputs equally, FP32; an empty zero_OP is zero
    throughout. A code q stands for (q - zero) * step. takes_codes: activations are rounded to INT8. bias_O: FP32, empty
    for none.
    """

    packed: Tensor
    num_inputs: int
    step_OP: Tensor
    zero_OP: Tensor
    takes_codes: bool
    bias_O: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        assert self.packed.dtype == torch.uint8
        assert self.num_groups == 1 or self.num_inputs % (self.num_groups * GROUP_STEP) == 0

    @property
    def num_groups(self) -> int:
        """P."""
        return self.step_OP.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.packed), self.num_inputs

    @property
    def format(self) -> int:
        """The kernel's number of the format."""
        return FOUR_BITS_BY_CODES if self.takes_codes else FORMATS[torch.uint8]

    def matrix(self, divisor: float) -> tuple[_Matrix, list[Tensor]]:
        """See `Weight.matrix`."""
        step_OP = (self.step_OP.float() / (divisor if self.takes_codes else 1.0)).contiguous()
        held = [self.packed, step_OP, self.zero_OP.float().contiguous(), torch.empty(0), self.bias_O.detach()]
        weight, step, zero, row_sum, bias = map(_pointer_to, held)
        size = self.num_inputs // self.num_groups
        description = _Matrix(weight, step, zero, self.num_groups, size, row_sum, bias, *self.shape, self.format)
        return description, held


AnyWeight = Weight | FourBitWeight
W = TypeVar("W", bound=Weight | FourBitWeight)
NO_WEIGHT = Weight(torch.empty(0, 0))
NO_NORM = torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class DecodeLayer:
    """The tensors of one layer. Weights that multiply the same activations have one format. Norms are FP32 factors;
    `NO_NORM` and `NO_WEIGHT` stand for missing ones. keys, values: of the cache, [L, K, S, d] each.
    head_router: the query heads of a key/value head are computed where its output is positive. window: tokens that a
    query sees, the present one included; 0 is all earlier ones.
    """

    q: AnyWeight
    k: AnyWeight
    v: AnyWeight
    o: AnyWeight
    gate: AnyWeight
    up: AnyWeight
    down: AnyWeight
    attention_norm: Tensor
    ffn_norm: Tensor
    keys: Tensor
    values: Tensor
    output_gate: AnyWeight = NO_WEIGHT
    head_router: AnyWeight = NO_WEIGHT
    attention_post_norm: Tensor = NO_NORM
    ffn_post_norm: Tensor = NO_NORM
    q_norm: Tensor = NO_NORM
    k_norm: Tensor = NO_NORM
    window: int = 0
    rotation: Rotation = "global"


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Shape of a decoder beyond its tensors. score_scale: factor on products of queries and keys; soft_cap: 0: none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    activation: str
    eps: float
    score_scale: float
    soft_cap: float = 0.0
    embedding_scale: float = 1.0


@dataclass(frozen=True)
class DecodeRows:
    """The tokens of a step, in any order; a token sees those of its sequence at earlier positions, also of this step.
    blocks: the block tables of all sequences, one after the other; first_block: the start of the table of a row's
    sequence; rope_rows: the row of the tables of cosines and sines that belongs to each token.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    positions: "array[int]" = field(default_factory=lambda: array("q"))
    rope_rows: "array[int]" = field(default_factory=lambda: array("q"))
    first_block: "array[int]" = field(default_factory=lambda: array("q"))
    blocks: "array[int]" = field(default_factory=lambda: array("q"))


class DecodeStep:
    """The kernel for one decoder and one cache. It points to their tensors, so that it follows changes in place but not
    tensors that take their place. Scales of INT8 weights are copied.
    """

    def __init__(self, shape: DecodeShape, layers: Sequence[DecodeLayer], embedding: Weight, norm_D: Tensor) -> None:
        # The kernel's structures hold addresses only: without these references the memory could be freed.
        self._held: list[Tensor] = []
        self._width = embedding.shape[1]
        structures = []
        for layer in layers:
            matrices = {name: self._matrix(getattr(layer, name)) for name in MATRICES}
            pointers = {name: self._pointer(getattr(layer, name)) for name in (*NORMS, "keys", "values")}
            rotation = ROTATIONS[layer.rotation]
            structures.append(_Layer(**matrices, **pointers, window=layer.window, rotation=rotation))
        self._layers = (_Layer * len(layers))(*structures)
        self._decoder = _Decoder(
            layers=self._layers,
            norm=self._pointer(norm_D),
            embedding=self._matrix(embedding, divisor=1.0),
            num_layers=len(layers),
            width=self._width,
            ffn_width=layers[0].gate.shape[0],
            activation=ACTIVATIONS[shape.activation],
            cache_format=FORMATS[layers[0].keys.dtype],
            block_len=layers[0].keys.shape[2],
            **{name: getattr(shape, name) for name in (*SIZES, *FACTORS)},
        )
        self._scratch = torch.empty(0)
        self.seconds: array[float] | None = None
        """Sums of the seconds of all steps' `PARTS`; None does not measure and costs nothing."""

    def __call__(self, rows: DecodeRows, tables: Sequence[Tensor]) -> Tensor:
        """Computes hidden states [N, D] after the final norm, FP32; the cache gets the tokens' keys and values. tables:
        cosines and signed sines as of `rope_tables`, of layers that see all tokens and of layers with a window, four in
        all, [any, rotary_dim] each.
        """
        library = cpu_kernels.kernels()
        assert library is not None
        assert all(table.is_contiguous() and table.dtype == torch.float32 for table in tables)
        num_rows, longest, threads = len(rows.tokens), max(rows.positions) + 1, torch.get_num_threads()
        arrays = (rows.tokens, rows.positions, rows.rope_rows, rows.first_block, rows.blocks)
        pointers = [*(one.buffer_info()[0] for one in arrays), *(table.data_ptr() for table in tables)]
        step = _Step(*pointers, num_rows, longest)
        needed = library.decode_scratch(
            ctypes.byref(self._decoder), ctypes.c_int64(num_rows), ctypes.c_int64(longest), threads
        )
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed)
        hidden_ND = torch.empty(num_rows, self._width)
        arguments = (
            ctypes.byref(self._decoder),
            ctypes.byref(step),
            ctypes.c_void_p(self._scratch.data_ptr()),
            ctypes.c_void_p(hidden_ND.data_ptr()),
            threads,
        )
        if self.seconds is None:
            library.decode_step(*arguments)
        else:
            assert len(self.seconds) == len(PARTS)
            library.decode_step_timed(*arguments, ctypes.c_void_p(self.seconds.buffer_info()[0]))
        return hidden_ND

    def _matrix(self, weight: AnyWeight, *, divisor: float = LARGEST_CODE) -> _Matrix:
        matrix, held = weight.matrix(divisor)
        self._held += held
        return matrix

    def _pointer(self, tensor: Tensor) -> int | None:
        self._held.append(tensor)
        return _pointer_to(tensor)


class RowProduct(Generic[W]):
    """x [N, I] times one weight', FP32 [N, O], with a row's bits independent of the other rows: the head of a decode
    step, and linear layers over integers.
    """

    def __init__(self, weight: W) -> None:
        self.weight = weight
        self._matrix, self._held = weight.matrix(LARGEST_CODE)

    def __reduce__(self) -> tuple[type["RowProduct[W]"], tuple[W]]:
        # A copy is made anew, so that it points to its own tensors.
        return RowProduct, (self.weight,)

    def __call__(self, x_NI: Tensor) -> Tensor:
        library = cpu_kernels.kernels()
        assert library is not None
        x_NI = x_NI.float().contiguous()
        num_rows = len(x_NI)
        num_outputs, num_inputs = self.weight.shape
        num_bytes = library.code_bytes(ctypes.c_int64(num_inputs), ctypes.c_int64(self.weight.format))
        codes = torch.empty(num_rows, num_bytes, dtype=torch.int8)
        peaks_N, out_NO = torch.empty(num_rows), torch.empty(num_rows, num_outputs)
        pointers = (ctypes.c_void_p(one.data_ptr()) for one in (peaks_N, codes, out_NO))
        library.multiply_rows(
            ctypes.byref(self._matrix),
            ctypes.c_void_p(x_NI.data_ptr()),
            ctypes.c_int64(num_rows),
            *pointers,
            torch.get_num_threads(),
        )
        return out_NO


def summarized(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likeliest token of each row, the first of equally likely ones, and the log-sum-exp, [N] each. Where a
    row is not finite, neither is the latter.
    """
    fits = logits_NV.dtype == torch.float32 and logits_NV.is_contiguous()
    if not (fits and cpu_kernels.take("decode_step", logits_NV)):
        return summarized_naive(logits_NV)
    library = cpu_kernels.kernels()
    assert library is not None
    num_rows, width = logits_NV.shape
    likeliest_N, log_sums_N = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    sizes = (ctypes.c_int64(num_rows), ctypes.c_int64(width))
    pointers = (ctypes.c_void_p(one.data_ptr()) for one in (likeliest_N, log_sums_N))
    library.summarize_rows(ctypes.c_void_p(logits_NV.data_ptr()), *sizes, *pointers, torch.get_num_threads())
    return likeliest_N, log_sums_N


def summarized_naive(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: the reference for `summarized`."""
    return logits_NV.argmax(dim=-1), logits_NV.logsumexp(dim=-1)


@dataclass(frozen=True)
class Draw:
    """A token to be drawn from a row of logits: number of the row, temperature and limits (`SamplingParams`), and a
    uniform random number in [0, 1).
    """

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float

    @property
    def divisor(self) -> float:
        """The temperature; the floor keeps quotients finite and is greedy in effect."""
        return max(self.temperature, 1e-5)

    @property
    def truncates(self) -> bool:
        """True if the token is drawn from some of the tokens only."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def drawn(logits_NV: Tensor, draws: Sequence[Draw]) -> list[int] | None:
    """Returns the token of each draw by inverse transform sampling from the tokens that min-p, then top-k, then top-p
    keep, in the order of their ids; None without the kernel. Of equally likely tokens the first ones are kept. A draw
    does not depend on the others. The reference is `infer/sampler.py: drawn_naive`.
    """
    fits = logits_NV.dtype == torch.float32 and logits_NV.is_contiguous()
    if not (fits and cpu_kernels.take("decode_step", logits_NV)):
        return None
    library, threads, width = cpu_kernels.kernels(), torch.get_num_threads(), logits_NV.shape[1]
    assert library is not None
    rows, tokens = array("q", [draw.row for draw in draws]), array("q", bytes(8 * len(draws)))
    settings = array("d", [n for one in draws for n in (one.divisor, one.top_k, one.top_p, one.min_p, one.uniform)])
    scratch = torch.empty(threads, 2 * width)
    pointers = [rows.buffer_info()[0], settings.buffer_info()[0]]
    library.draw_rows(
        ctypes.c_void_p(logits_NV.data_ptr()),
        ctypes.c_int64(width),
        *map(ctypes.c_void_p, pointers),
        ctypes.c_int64(len(draws)),
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_void_p(tokens.buffer_info()[0]),
        threads,
    )
    return tokens.tolist()


def _pointer_to(tensor: Tensor) -> Any:
    assert tensor.is_contiguous()
    return tensor.data_ptr() if tensor.numel() else None
