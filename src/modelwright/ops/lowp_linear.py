"""The products of a linear layer in each number format, as `LinearGemms`.

A format's three products read their factors in that format and sum in FP32 (or in integers); the output has the
`result` format. Floating-point formats of 16 bits and more are plain casts and need no products of their own:
`in_float`. Sources: INT8 with per-row scales (SwitchBack, Wortsman et al. 2023; Jetfire, Xi et al. 2024), FP8 with
current or delayed scaling (Micikevicius et al. 2022), blockwise with E4M3 in all three products (DeepSeek-V3, 2024).

Legend: N flattened rows, I inputs, O outputs.
"""

import importlib.util
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from modelwright.ops.matmul import PLAIN, LinearGemms, multiply, product
from modelwright.ops.quantize import (
    ROW_BLOCKS,
    ROWWISE,
    SQUARE_BLOCKS,
    TENSORWISE,
    Grid,
    dequantize,
    has_fp8_kernel,
    quantize,
    scaled_product,
)

log = logging.getLogger("modelwright.ops")
Codes = tuple[Tensor, Tensor]
"""Codes and scales."""


class SharedCodes:
    """Codes of the tensor that was quantized last, for projections that read the same one (queries, keys and values;
    gate and up): quantized once, and saved once for backward. Valid while its memory lives and is not written to.
    Tensor wrappers (DTensor), inference tensors and tensors under tracing are quantized every time.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Any], tuple[Any, ...], Codes] | None = None

    def __call__(self, x_NI: Tensor, grid: Grid, dtype: torch.dtype) -> Codes:
        """The result of `quantize`."""
        if torch.compiler.is_compiling() or type(x_NI) not in (Tensor, FakeTensor) or x_NI.is_inference():
            return quantize(x_NI, grid, dtype)
        # `_version` counts writes in place; the storage's identity, not its address, tells a new tensor in old memory.
        storage, last = x_NI.untyped_storage(), self._last
        key = (x_NI._version, x_NI.storage_offset(), x_NI.shape, x_NI.stride(), x_NI.dtype, grid, dtype)
        if last is not None and last[0]() is storage and last[1] == key:
            return last[2]
        made = quantize(x_NI, grid, dtype)
        self._last = weakref.ref(storage, self._forget), key, made
        return made

    def _forget(self, gone: weakref.ref[Any]) -> None:
        if self._last is not None and self._last[0] is gone:
            self._last = None


Format = Literal["fp32", "bf16", "fp16", "fp8", "int8"]
FLOATS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats that are plain casts."""
Recipe = Literal["tensorwise", "rowwise", "blockwise"]
Role = Literal["x", "weight", "grad"]
Kind = Literal["forward", "input gradient", "weight gradient"]
FACTORS: dict[Kind, tuple[Role, Role]] = {
    "forward": ("x", "weight"),
    "input gradient": ("grad", "weight"),
    "weight gradient": ("grad", "x"),
}
"""Factors of each product of a layer."""
Maxima = Callable[[Role, Tensor], Tensor]
"""`(role of a factor, its present largest magnitudes) -> the magnitudes to scale by`."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRIDS: dict[Recipe, tuple[Grid, Grid]] = {
    "tensorwise": (TENSORWISE, TENSORWISE),
    "rowwise": (ROWWISE, ROWWISE),
    "blockwise": (ROW_BLOCKS, SQUARE_BLOCKS),
}
"""Scale granularity of activations and gradients, and of weights."""


def in_float(
    dtype: torch.dtype, x: Tensor, weight_OI: Tensor, *, products: LinearGemms = PLAIN, keeps_cast: bool = False
) -> Tensor:
    """Returns x [..., I] times weight', computed and returned in `dtype`; gradients are computed in it and returned in
    the original formats. keeps_cast: keep the cast of the weight for backward, for blocks that are recomputed anyway.
    """
    if keeps_cast or weight_OI.dtype == dtype:
        return multiply(x.to(dtype), weight_OI.to(dtype), products)
    # The weight is cast again for backward; otherwise a model would hold the casts of all its weights in between.
    casting = replace(
        products,
        forward=lambda x_NI, weight_OI: products.forward(x_NI, weight_OI.to(dtype)),
        dgrad=lambda dy_NO, weight_OI: products.dgrad(dy_NO, weight_OI.to(dtype)),
    )
    return multiply(x.to(dtype), weight_OI, casting)


def plain_cast(product: Callable[..., Tensor]) -> torch.dtype | None:
    """The format to which a product by `in_float` casts; None for other products, or with replaced `products`."""
    if not isinstance(product, partial) or product.func is not in_float:
        return None
    return product.args[0] if product.keywords.get("products", PLAIN) is PLAIN else None


def in_products(products: LinearGemms, result: torch.dtype, x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x [..., I] times weight' by `products`, with the output in `result`."""
    return multiply(x.to(result), weight_OI, products)


def _grid_of(recipe: Recipe, role: Role) -> Grid:
    of_rows, of_weights = GRIDS[recipe]
    return of_weights if role == "weight" else of_rows


def _wide_weight_gradient(dy_NO: Tensor, x_NI: Tensor) -> Tensor:
    return product(dy_NO.T, x_NI.to(dy_NO.dtype))


def _has_kernel(
    device: torch.device, a_dtype: torch.dtype, b_dtype: torch.dtype, recipe: Recipe, kind: Kind, result: torch.dtype
) -> bool:
    # A constant of compiled blocks. By names, because `torch.compile` takes numbers for variables.
    left, right = FACTORS[kind]
    return has_fp8_kernel(device, a_dtype, b_dtype, (_grid_of(recipe, left), _grid_of(recipe, right)), result)


# What `torch.compiler.assume_constant_result` does; that imports TorchDynamo, 2 s and 75 MB in each process.
setattr(_has_kernel, "_dynamo_marked_constant", True)  # noqa: B010  (unknown to a type checker)


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """FP8 products by a recipe.

    result: format of the output. gradients: FP8 format of the gradients. wgrad_high_precision: the weight's gradient is
    computed from unquantized factors. cache: save the quantized input for backward, one byte per element. shared: cache
    of quantized inputs for layers that read the same one. maxima: for delayed scaling, tensorwise only; without
    `shared`, because every layer has its own.
    """

    recipe: Recipe
    result: torch.dtype
    gradients: torch.dtype = E5M2
    wgrad_high_precision: bool = False
    cache: bool = False
    shared: SharedCodes | None = None
    maxima: Maxima | None = None

    def products(self) -> LinearGemms:
        wgrad = _wide_weight_gradient if self.wgrad_high_precision else self._weight_gradient
        packing = {"pack": self._pack, "unpack": self._unpack} if self.cache else {}
        name = f"fp8-{self.recipe}"
        return LinearGemms(name=name, forward=self._forward, dgrad=self._input_gradient, wgrad=wgrad, **packing)

    def _quantized(self, factor: Tensor, role: Role) -> Codes:
        dtype = self.gradients if role == "grad" else E4M3
        maxima = partial(self.maxima, role) if self.maxima else None
        return quantize(factor, _grid_of(self.recipe, role), dtype, maxima=maxima)

    def _product(self, kind: Kind, a: Codes, b: Codes) -> Tensor:
        left, right = FACTORS[kind]
        grids = _grid_of(self.recipe, left), _grid_of(self.recipe, right)
        has_kernel = _has_kernel(a[0].device, a[0].dtype, b[0].dtype, self.recipe, kind, self.result)
        return scaled_product(a, b, grids, self.result, name=f"fp8 {self.recipe}, {kind}", has_kernel=has_kernel)

    def _forward(self, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        x = self._pack(x_NI)
        return self._product("forward", x, self._quantized(weight_OI, "weight"))

    def _input_gradient(self, dy_NO: Tensor, weight_OI: Tensor) -> Tensor:
        dy = self._quantized(dy_NO, "grad")
        return self._product("input gradient", dy, self._quantized(weight_OI.T, "weight"))

    def _weight_gradient(self, dy_NO: Tensor, x_NI: Tensor) -> Tensor:
        dy = self._quantized(dy_NO.T, "grad")
        return self._product("weight gradient", dy, self._quantized(x_NI.T, "x"))

    def _pack(self, x_NI: Tensor) -> Codes:
        return self.shared(x_NI, _grid_of(self.recipe, "x"), E4M3) if self.shared else self._quantized(x_NI, "x")

    def _unpack(self, *packed: Tensor) -> Tensor:
        codes_NI, scales = packed
        return dequantize(codes_NI, scales, _grid_of(self.recipe, "x")).to(self.result)


TORCHAO_MULTIPLE = 16
"""Divisor of all dimensions of the card's FP8 products."""


@cache
def has_torchao() -> bool:
    """Returns whether torchao is installed; if not, this is logged once."""
    found = importlib.util.find_spec("torchao") is not None
    if not found:
        log.warning("FP8 products are this package's own: torchao is not installed; pip install 'modelwright[fp8]'")
    return found


def torchao_product(
    recipe: Recipe, own: Callable[[Tensor, Tensor], Tensor], result: torch.dtype, *, wide: bool, emulate: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns torchao's FP8 product with its gradients, `(x [..., I], weight [O, I]) -> [..., O]` in `result`, for
    compiled blocks on CUDA: by tensor, or by row with E4M3 for gradients and scales that are powers of two. own: this
    package's product, for dimensions that the card's kernels do not take. wide: compute weight gradients from
    unquantized factors (`gw_hp`). emulate: multiply dequantized factors, on any device.
    """
    from torchao.float8.config import Float8LinearConfig  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_training_tensor import (  # pyright: ignore[reportMissingImports]
        LinearMMConfig,
        ScaledMMConfig,
    )

    config: Any = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp" if wide else recipe)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    settings: Any = LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms))

    def multiply_fp8(x: Tensor, weight_OI: Tensor) -> Tensor:
        sizes = (x.numel() // x.shape[-1], *weight_OI.shape)
        if any(size % TORCHAO_MULTIPLE for size in sizes):
            return own(x, weight_OI)
        return matmul_with_hp_or_float8_args.apply(x.to(result), weight_OI.to(result).t(), settings, config)

    return multiply_fp8


@dataclass(frozen=True, kw_only=True)
class Int8:
    """INT8 products with one scale per row of both factors, along the summed dimension.

    stochastic: gradients are rounded stochastically, so that small ones are unbiased instead of zero.
    wgrad_high_precision: as in `Fp8`; its sum runs over all tokens, whose magnitudes differ most.
    """

    result: torch.dtype
    stochastic: bool = True
    wgrad_high_precision: bool = False

    def products(self) -> LinearGemms:
        narrow = partial(self._product, stochastic=self.stochastic)
        return LinearGemms(
            name="int8",
            forward=partial(self._product, stochastic=False),
            dgrad=lambda dy_NO, weight_OI: narrow(dy_NO, weight_OI.T),
            wgrad=_wide_weight_gradient if self.wgrad_high_precision else lambda dy_NO, x_NI: narrow(dy_NO.T, x_NI.T),
        )

    def _product(self, left: Tensor, right: Tensor, *, stochastic: bool) -> Tensor:
        a = quantize(left, ROWWISE, torch.int8, stochastic=stochastic)
        b = quantize(right, ROWWISE, torch.int8)
        return scaled_product(a, b, (ROWWISE, ROWWISE), self.result)
