"""A model pass: applies a policy's formats to a decoder's layers, so that they can be changed during training.

Norms output the format that the following layers read, so that nothing is cast twice; matrix products are replaced
through `Linear.product`. The residual stream has the embedding's format. Parameter names and the weights' own format
are unchanged.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.core.config import ConfigError
from modelwright.model.decoder import Block, Decoder, ModelConfig, Product, RMSNorm, decoders_in
from modelwright.ops.lowp_linear import (
    FLOATS,
    Format,
    Fp8,
    Int8,
    Role,
    SharedCodes,
    has_torchao,
    in_float,
    in_products,
    torchao_product,
)
from modelwright.ops.matmul import PLAIN, LinearGemms
from modelwright.train.precision.policy import Kind, PrecisionConfig

Around = Callable[[str, LinearGemms], LinearGemms]
"""`(a projection's name, its products) -> the products that replace them`."""
ROLES: tuple[Role, ...] = ("x", "weight", "grad")


def part_of(name: str) -> str:
    """The unit that changes its format as a whole: `blocks.3.ffn.up_proj` -> `blocks.3.ffn`."""
    return name.rpartition(".")[0]


def kind_of(part: str) -> Kind:
    """The kind of a submodule: `blocks.3.attention` -> attention; all others, such as convolutions, count as ffn."""
    return "attention" if part.endswith(".attention") else "ffn"


def names_of_projections(config: ModelConfig) -> list[str]:
    """Names of all projections of a model of this shape, in the order of the layers."""
    attention = [f"attention.{name}_proj" for name in ("q", "k", "v", "o")]
    gate = ["attention.output_gate"] if config.gate_dim else []
    router = ["attention.head_router"] if config.router_dim else []
    ffn = [f"ffn.{name}_proj" for name in ("gate", "up", "down")]
    return [
        f"blocks.{layer}.{name}" for layer in range(config.num_layers) for name in (*attention, *gate, *router, *ffn)
    ]


class AmaxHistory:
    """Maxima of one layer's factors in recent steps (amax history), by which the present factors are scaled. The first
    step does not have a history, and uses its own maxima.
    """

    def __init__(self, length: int) -> None:
        self.past: dict[Role, deque[float]] = {role: deque(maxlen=length) for role in ROLES}
        self._now: dict[Role, list[Tensor]] = {role: [] for role in ROLES}

    def __call__(self, role: Role, now: Tensor) -> Tensor:
        self._now[role].append(now)
        if not self.past[role]:
            return now
        return torch.full_like(now, max(self.past[role]))

    def begin(self) -> None:
        """Discards the maxima of evaluation, outside of steps."""
        self._now = {role: [] for role in ROLES}

    def collect(self) -> list[float]:
        """Returns this rank's maxima of the step, by role, and resets them."""
        result = [float(torch.stack(now).max()) if now else 0.0 for now in self._now.values()]
        self.begin()
        return result

    def push(self, maxima: Sequence[float]) -> None:
        """Ends the step. maxima: of all ranks; skipped if not finite: `quantize` made the gradients so, too."""
        for role, value in zip(ROLES, maxima, strict=True):
            if 0.0 < value < float("inf"):
                self.past[role].append(value)


Watched = Callable[[str, Product], Product]
"""Name and product of a projection -> the same product, observed."""


class ModelPrecision:
    """The formats of one model's parts, `blocks.3.attention` or `blocks.3.ffn`; `change` replaces some of them."""

    def __init__(self, model: Decoder, config: PrecisionConfig) -> None:
        self.model = model
        self.config = config
        self.projections = model.projections()
        self.parts = list(dict.fromkeys(map(part_of, self.projections)))
        self.formats: dict[str, Format] = {part: config.format_of(kind_of(part)) for part in self.parts}
        self.delayed = {name: AmaxHistory(config.fp8.amax_history_len) for name in self.projections if config.delays}
        self.shared = {
            part: SharedCodes() for part in self.parts if config.fp8.save_quantized_input and not config.delays
        }
        self._watched: Watched | None = None
        self._quantized: Watched | None = None
        self._around: Around | None = None
        self._apply()

    def change(self, formats: Mapping[str, Format]) -> None:
        """Lets these parts compute in these formats from now on."""
        self.formats |= formats
        self._apply()

    def watch(self, watched: Watched | None) -> None:
        """Passes every product through `watched` from now on; None removes it."""
        self._watched = watched
        self._apply()

    def quantize(self, quantized: Watched) -> None:
        """Passes every product through `quantized`, which rounds its factors, also in evaluation in FP32."""
        self._quantized = quantized
        self._apply()

    def wrap_products(self, around: Around | None) -> None:
        """Wraps every projection's products with this function, in any format; None removes it."""
        self._around = around
        self._apply()

    def product(self, name: str, chosen: Format) -> Product:
        """The product of the projection of this name in a format."""
        config, result = self.config, self.config.result_of[chosen]
        if chosen == "fp32" and self._is_plain and self._around is None:
            return F.linear
        # Attention keeps the input of o_proj anyway, so that its quantized copy would only be added.
        caches = config.fp8.save_quantized_input and not name.endswith("o_proj")
        history = self.delayed.get(name) if chosen == "fp8" else None
        if chosen in FLOATS:
            products = PLAIN
        elif chosen == "int8":
            wide = config.int8.wgrad_high_precision
            rounding = config.int8.stochastic_rounding
            products = Int8(result=result, stochastic=rounding, wgrad_high_precision=wide).products()
        else:
            products = Fp8(
                recipe=config.fp8.recipe,
                result=result,
                gradients=config.fp8.gradient_dtype,
                wgrad_high_precision=config.fp8.wgrad_high_precision,
                cache=caches,
                shared=self.shared.get(part_of(name)) if caches else None,
                **({} if history is None else {"maxima": history}),
            ).products()
        if self._around is not None:
            products = self._around(name, products)
        if chosen in FLOATS:
            # Unnamed projections are not the model's, and those of `heads` are not recomputed in backward.
            block = self.model.blocks[name.split(".")[1]] if name.startswith("blocks.") else None
            is_recomputed = isinstance(block, Block) and block.is_recomputed
            return partial(in_float, FLOATS[chosen], products=products, keeps_cast=is_recomputed)
        multiply: Product = partial(in_products, products, result)
        # torchao on CUDA, unless a setting or a technique changes this projection's products. It has one recipe with
        # unquantized factors for weight gradients, by row.
        wide, recipe = config.fp8.wgrad_high_precision, config.fp8.recipe
        own = self._around is not None or config.fp8.save_quantized_input or history is not None
        own |= bool(config.fp8.grad_dtype) or recipe == "blockwise" or (recipe == "tensorwise" and wide)
        on_cuda = next(cast(nn.Module, self.model).parameters()).device.type == "cuda"
        if chosen == "fp8" and on_cuda and not own and has_torchao():
            return torchao_product(recipe, multiply, result, wide=wide)
        # Compiled, a history would be a constant of the code, which would then be compiled anew in every step.
        return multiply if history is None else cast("Product", torch.compiler.disable(multiply))

    def begin_step(self) -> None:
        """Prepares for a step; call it before each."""
        for delayed in self.delayed.values():
            delayed.begin()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Lets the model compute in FP32 within the block, if the config says so."""
        if self.config.eval_dtype == "policy":
            yield
            return
        remove_formats(self.model)
        if self._quantized:
            for name, projection in self.projections.items():
                projection.product = self._quantized(name, projection.product)
        try:
            yield
        finally:
            self._apply()

    @property
    def _is_plain(self) -> bool:
        """True if everything is computed in the format of the weights, so that nothing needs a cast."""
        return {*self.config.formats.values(), *self.formats.values()} == {"fp32"}

    def _apply(self) -> None:
        """Sets the products, and the output format of norms: the next part's. Head norms keep their input's format."""
        plain, ops, formats = self._is_plain, self.config.fp32_ops, self.config.formats
        result_of = self.config.result_of
        for name, projection in self.projections.items():
            projection.product = self.product(name, self.formats[part_of(name)])
            for around in (self._quantized, self._watched):  # observers see the product of rounded factors
                projection.product = around(name, projection.product) if around else projection.product
        for norm in norms_of(self.model):
            norm.in_fp32 = "norm" in ops
        for prefix, decoder in decoders_in(self.model).items():
            decoder.ends.stream_dtype = None if plain else FLOATS[formats["embedding"]]
            decoder.ends.head_dtype = None if plain else FLOATS[formats["head"]]
            decoder.ends.loss_in_fp32 = "loss" in ops
            for layer, block in decoder.blocks.items():
                assert isinstance(block, Block)
                attention, ffn = f"{prefix}blocks.{layer}.attention", f"{prefix}blocks.{layer}.ffn"
                block.attention_norm.out_dtype = None if plain else result_of[self.formats[attention]]
                block.ffn_norm.out_dtype = None if plain else result_of[self.formats[ffn]]
                block.ffn.activation_in_fp32 = "activation" in ops


def norms_of(model: Decoder) -> Iterator[RMSNorm]:
    """All norms on this rank, including head norms."""
    return (module for module in cast(nn.Module, model).modules() if isinstance(module, RMSNorm))


def remove_formats(model: Decoder) -> None:
    """Makes the model compute in the format of its weights again."""
    for projection in model.projections().values():
        projection.product = F.linear
    for norm in norms_of(model):
        norm.out_dtype, norm.in_fp32 = None, True
    for decoder in decoders_in(model).values():
        decoder.ends.reset()
        for block in decoder.blocks.values():
            assert isinstance(block, Block)
            block.ffn.activation_in_fp32 = False


@contextmanager
def fp32_products(*, tf32: bool = False, onednn: bool = False, on_cpu: bool = True) -> Iterator[None]:
    """Lets FP32 products on CUDA use TF32 or not within the block, and those on a CPU oneDNN or not. Raises
    `ConfigError` if oneDNN would not be used, or would round.
    """
    precision = torch.get_float32_matmul_precision()
    if not onednn:
        # Compiled kernels, fused attention among them, read this setting, too.
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    torch.set_float32_matmul_precision("medium")  # makes PyTorch ask oneDNN, which may round to BF16 but need not
    try:
        if not (on_cpu and onednn_multiplies()):
            raise ConfigError(
                "precision.fp32_matmul onednn: PyTorch does not use oneDNN for FP32 products here (it needs "
                "AVX-512 and a build with oneDNN); choose default"
            )
        if not _products_are_exact():
            text = "precision.fp32_matmul onednn: oneDNN rounds FP32 products to BF16 on this processor"
            raise ConfigError(f"{text}; choose default, or policy bf16_mixed, which is faster still")
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def onednn_multiplies() -> bool:
    """True if PyTorch would use oneDNN for FP32 products, by the conditions that it checks itself."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _products_are_exact() -> bool:
    """True if FP32 products on this CPU are exact to FP32's last bits; BF16's errors are 10,000 times larger."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(256, 256, generator=draw) for _ in range(2))
    exact = x.double() @ y.double()
    return float((x @ y - exact).abs().max() / exact.abs().max()) < 1e-5
