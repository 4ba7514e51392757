"""What a block keeps for backward when FP8 codes stand for its inputs: fewer bytes, and the same bits everywhere."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from modelwright.core.config import parse
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.ops import lowp_linear
from modelwright.ops.lowp_linear import SharedCodes
from modelwright.ops.quantize import quantize
from modelwright.train.memory.checkpointing import Segment, checkpoint_segments
from modelwright.train.parallelize import compile_each_block
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig
from tiny_decoder import make_decoder

ROWS, LENGTH, DIM, FFN_DIM = 2, 64, 128, 352
SHAPE = {"num_layers": 1, "model_dim": DIM, "ffn_dim": FFN_DIM, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def model_of(recipe: str, *, cache: bool) -> tuple[Decoder, ModelPrecision]:
    """One block of usual proportions."""
    model = make_decoder(**SHAPE)
    options = {"policy": "fp8", "fp8": {"recipe": recipe, "save_quantized_input": cache}}
    return model, ModelPrecision(model, parse(PrecisionConfig, options, constants=True))


def run(model: Decoder) -> tuple[torch.Tensor, int]:
    """What the block gives, and the bytes of all storages but the weights' that wait for its backward."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    hidden = torch.randn(ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
    positions, segments = torch.arange(LENGTH).repeat(ROWS, 1), torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = model.run_blocks(hidden, positions, packed_attend(segments))
    return found, sum(storage.nbytes() for storage in kept.values())


def outcome(model: Decoder) -> list[torch.Tensor]:
    """What the block gives and all weights' gradients."""
    found, _ = run(model)
    (found * torch.linspace(-1, 1, DIM)).sum().backward()
    gradients = [parameter.grad for name, parameter in model.named_parameters() if name.startswith("blocks")]
    assert all(gradient is not None for gradient in gradients)
    return [found.detach(), *(one for one in gradients if one is not None)]


@pytest.mark.parametrize(
    ("recipe", "scales"), [("tensorwise", 3), ("rowwise", 3 * 128), ("blockwise", (1 + 1 + 3) * 128)]
)
def test_a_block_keeps_one_byte_for_each_input_that_nothing_else_keeps(recipe, scales):
    """It keeps the inputs of attention, of the FFN and of its last product, with an FP32 scale for each group."""
    (plain, _), (cached, formats) = model_of(recipe, cache=False), model_of(recipe, cache=True)
    (_, bytes_plain), (alive, bytes_cached) = run(plain), run(cached)
    assert bytes_plain - bytes_cached == ROWS * LENGTH * (DIM + DIM + FFN_DIM) - 4 * scales
    assert bytes_cached < 0.9 * bytes_plain
    assert alive.grad_fn is not None
    assert all(shared._last is None for shared in formats.shared.values())  # codes live in the graph alone


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_shared_codes_change_no_bit(recipe, monkeypatch):
    found = outcome(model_of(recipe, cache=True)[0])
    monkeypatch.setattr(SharedCodes, "__call__", lambda _, *given: quantize(*given))
    alone = outcome(model_of(recipe, cache=True)[0])
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_an_input_is_quantized_once_in_forward(monkeypatch):
    calls: list[str] = []
    within: list[SharedCodes] = []
    share = SharedCodes.__call__

    def shared(codes, *given):
        within.append(codes)
        try:
            return share(codes, *given)
        finally:
            within.pop()

    def counted(*given, **more):
        calls.append("shared" if within else "own")
        return quantize(*given, **more)

    monkeypatch.setattr(SharedCodes, "__call__", shared)
    monkeypatch.setattr(lowp_linear, "quantize", counted)
    run(model_of("tensorwise", cache=True)[0])
    assert calls.count("shared") == 3
    assert calls.count("own") == 7 + 1  # all weights, and the input of o_proj


def test_a_recomputed_block_gives_the_same():
    wanted = outcome(model_of("tensorwise", cache=True)[0])
    model, formats = model_of("tensorwise", cache=True)
    checkpoint_segments(model, [Segment(num_layers=1, recompute=True)])
    formats.change({})
    assert all(torch.equal(a, b) for a, b in zip(wanted, outcome(model), strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
def test_a_compiled_block_quantizes_each_time_with_the_same_result(monkeypatch):
    results = []
    for call in (SharedCodes.__call__, lambda _, *given: quantize(*given)):
        torch.compiler.reset()
        monkeypatch.setattr(SharedCodes, "__call__", call)
        results.append(outcome(compile_each_block(model_of("tensorwise", cache=True)[0], backend="eager")))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_the_search_for_a_kernel_is_no_part_of_the_graph(recipe, monkeypatch):
    """It draws random factors and reads results back, of which no graph can be made; on CPUs it ends before."""

    def search(device, a_dtype, b_dtype, grids, result):
        return torch.randn(2, generator=torch.Generator(device).manual_seed(0)).sum().item() > 100

    monkeypatch.setattr(lowp_linear, "has_fp8_kernel", search)
    exact, eager = outcome(make_decoder(**SHAPE)), outcome(model_of(recipe, cache=False)[0])
    torch.compiler.reset()
    model, _ = model_of(recipe, cache=False)
    for block in model.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    for found, one, wanted in zip(outcome(model), eager, exact, strict=True):  # other roundings, and as far from FP32
        assert (found - wanted).norm() < 1.1 * (one - wanted).norm()
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it meets on its way
def test_a_compiled_block_is_not_compiled_again_as_the_history_of_delayed_scaling_changes():
    torch.compiler.reset()
    compilations, model = CompileCounter(), make_decoder(num_layers=1)
    precision = ModelPrecision(model, parse(PrecisionConfig, {"policy": "fp8", "fp8": {"scaling": "delayed"}}))
    for block in model.blocks.values():
        block.compile(backend=compilations)
    num_frames = []
    hidden = torch.randn(2, 16, model.config.model_dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    positions, segments = torch.arange(16).repeat(2, 1), torch.zeros(2, 16, dtype=torch.int32)
    for step in range(4):
        precision.begin_step()
        model.run_blocks(hidden, positions, packed_attend(segments)).sum().backward()
        for history in precision.delayed.values():
            history.push([(1 + step) * largest for largest in history.collect()])
        num_frames.append(compilations.frame_count)
    assert num_frames == [num_frames[0]] * 4
    assert num_frames[0] > 0
    torch.compiler.reset()
