"""The decoder: no leak between documents or from the future, initialization, compile and BF16."""

from functools import partial

import pytest
import torch

from modelwright.model.attention import causal_attend, masked_attend, packed_attend
from modelwright.model.decoder import Decoder
from modelwright.ops.cross_entropy import linear_cross_entropy
from modelwright.ops.lowp_linear import in_float
from tiny_decoder import make_config, make_decoder
from tolerances import TOLERANCES


def make_row(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and segments [1, T] of documents of these lengths."""
    total = sum(lengths)
    tokens = torch.randint(0, 96, (1, total), generator=torch.Generator().manual_seed(total))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    segments = torch.cat([torch.full((length,), i, dtype=torch.int32) for i, length in enumerate(lengths)])[None]
    return tokens, positions, segments


@pytest.mark.parametrize("qk_norm", [True, False])
def test_packed_documents_equal_separate_ones(qk_norm):
    model = make_decoder(qk_norm=qk_norm)
    tokens, positions, segments = make_row(7, 1, 12)
    packed = model(tokens, positions, packed_attend(segments))
    start = 0
    for length in (7, 1, 12):
        part = slice(start, start + length)
        alone = model(tokens[:, part], positions[:, part], causal_attend())
        torch.testing.assert_close(packed[:, part], alone, **TOLERANCES["fp32_op"])
        start += length


def test_no_gradient_between_documents():
    model = make_decoder()
    tokens, positions, segments = make_row(6, 5)
    embedded = model.embedding(tokens).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda *_: embedded)
    hidden = model(tokens, positions, packed_attend(segments))
    (grad,) = torch.autograd.grad(hidden[0, 8].sum(), embedded)
    reached = grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [False] * 6 + [True] * 3 + [False] * 2


def test_tiles_and_mask_give_the_same_gradients():
    tokens, positions, segments = make_row(9, 20, 3)
    gradients = []
    for attend in (packed_attend(segments), masked_attend(segments)):
        model = make_decoder()
        hidden = model(tokens, positions, attend)
        linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, tokens.flatten()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


def test_every_parameter_gets_a_gradient():
    model = make_decoder(tie_embeddings=False)
    tokens, positions, segments = make_row(5, 5)
    hidden = model(tokens, positions, packed_attend(segments))
    linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, tokens.flatten()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_init_is_a_function_of_the_seed():
    first, second, other = (Decoder(make_config()) for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        model.init_weights(seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    std = 0.1 / (2 * first.config.num_layers) ** 0.5
    weights = dict(first.named_parameters())
    assert weights["blocks.0.ffn.down_proj.weight"].std().item() == pytest.approx(std, rel=0.1)


def test_tied_head_is_the_embedding():
    assert make_decoder().head_weight is not None
    tied, untied = make_decoder(tie_embeddings=True), make_decoder(tie_embeddings=False)
    assert tied.head_weight is tied.embedding.weight
    assert untied.head_weight is not untied.embedding.weight


def test_bf16_stays_near_fp32():
    model = make_decoder()
    tokens, positions, segments = make_row(9, 20, 3)
    exact = model(tokens, positions, packed_attend(segments))
    model.ends.stream_dtype = torch.bfloat16
    for projection in model.projections().values():
        projection.product = partial(in_float, torch.bfloat16)
    hidden = model(tokens, positions, packed_attend(segments))
    assert hidden.dtype == torch.bfloat16
    hidden.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.blocks.parameters())
    torch.testing.assert_close(hidden.float(), exact, rtol=0.0, atol=5 * TOLERANCES["bf16_op"]["atol"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own tracer
def test_blocks_compile_without_graph_breaks():
    torch.compiler.reset()  # other tests of this process may have used up the number of recompilations
    tokens, positions, segments = make_row(9, 20, 3)
    gradients = []
    for compiled in (True, False):
        model = make_decoder()
        if compiled:
            for block in model.blocks.values():
                block.compile(backend="aot_eager", fullgraph=True)
        hidden = model(tokens, positions, packed_attend(segments))
        gradients.append(torch.autograd.grad(hidden.sin().sum(), list(model.parameters())))
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


def test_inference_mode_gives_the_same_hidden_states():
    model = make_decoder()
    tokens, positions, segments = make_row(9, 20, 3)
    with torch.inference_mode():
        hidden = model(tokens, positions, packed_attend(segments))
    with_gradients = model(tokens, positions, packed_attend(segments))
    torch.testing.assert_close(hidden, with_gradients, **TOLERANCES["fp32_op"])
