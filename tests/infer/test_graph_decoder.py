"""The step that CUDA graphs capture against the path of the model runner: on a CPU without a graph, with
FlexAttention's compiled kernel over the paged cache; on a CUDA machine with graphs.
"""

from typing import Any

import pytest
import torch

from infer.engine_runs import GREEDY, answer, drain, make_engine, make_model, tokens
from modelwright.core.config import ModelError
from modelwright.infer import engine as engine_module
from modelwright.infer.graph_decoder import GraphDecoder, graph_decoder
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.sequence import DecodeRow, Sequence
from modelwright.model.decoder import AttentionConfig, Decoder
from modelwright.ops.attention import masked_attention_naive
from modelwright.ops.flex_attention import fused_paged_attention, paged_block_mask
from tolerances import TOLERANCES

PROMPT_LENS = (1, 9, 40, 23, 16)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def with_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines on a CPU decode by a `GraphDecoder`; returns the numbers of rows that it computes."""
    sizes: list[int] = []

    class Watched(GraphDecoder):
        def _compute(self, inputs):
            sizes.append(len(inputs))
            return super()._compute(inputs)

    class HeadsFirst(PagedCache):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "heads_first": True})

    def decoder(model, cache):
        return Watched(model, cache, model.logits, row_multiple=2), ""

    monkeypatch.setattr(engine_module, "PagedCache", HeadsFirst)
    monkeypatch.setattr(engine_module, "decode_operator", decoder)
    return sizes


def answers(model: Decoder, **settings: Any) -> list[list[Any]]:
    """Greedy answers of prompts that begin and end at different times and share blocks."""
    engine = make_engine(model, kv_cache_tokens=512, **settings)
    for number, length in enumerate(PROMPT_LENS):
        engine.add(str(number), tokens(length, seed=0), GREEDY)
        engine.step()
    outputs = drain(engine)
    return [answer(outputs[str(number)]) for number in range(len(PROMPT_LENS))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 4, "attention": AttentionConfig(window=20, window_layers=(1,), soft_cap=4.0)},
        {"num_heads": 3, "num_kv_heads": 1},
    ],
    ids=["plain", "window and cap", "three heads of one group"],
)
def test_answers_are_those_of_the_model(changes, monkeypatch):
    model = make_model(**changes)
    monkeypatch.setenv("MODELWRIGHT_CPU_KERNELS", "0")
    expected = answers(model)
    sizes = with_graphs(monkeypatch)
    found = answers(model)
    assert set(sizes) == {2, 4, 8}
    for ours, reference in zip(found, expected, strict=True):
        assert [one[0] for one in ours] == [one[0] for one in reference]
        assert [one[1] for one in ours] == pytest.approx([one[1] for one in reference], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (20, 3.0)])
def test_paged_attention_is_the_naive_reference_over_any_block_table(window, cap):
    draw = torch.Generator().manual_seed(0)
    block_len, num_blocks, heads, kv_heads, dim = 16, 12, 4, 2, 16
    tables = torch.tensor([[3, 7, 1, 0], [3, 7, 5, 9], [11, 0, 0, 0], [0, 0, 0, 0]])  # two share blocks; one is padding
    positions = torch.tensor([40, 63, 0, 0])
    keys, values = (torch.randn(kv_heads, num_blocks, block_len, dim, generator=draw) for _ in range(2))
    for stored in (keys, values):  # nothing of a block that no table lists reaches a result
        stored[:, [2, 4, 6, 8, 10]] = torch.nan
    queries = torch.randn(len(tables), heads, dim, generator=draw)
    mask = paged_block_mask(tables, positions, num_blocks, block_len, window)
    out = fused_paged_attention(queries, keys, values, mask, cap)
    assert out[3].isfinite().all()
    for row, position in enumerate(positions[:3].tolist()):
        visible = (stored[:, tables[row]].flatten(1, 2)[:, : position + 1] for stored in (keys, values))
        k, v = (one.transpose(0, 1)[None] for one in visible)
        seen = torch.ones(1, 1, 1, position + 1, dtype=torch.bool)
        if window:
            seen[..., : max(0, position + 1 - window)] = False
        naive = masked_attention_naive(queries[row][None, None], k, v, seen, soft_cap=cap)
        torch.testing.assert_close(out[row], naive[0, 0], **TOLERANCES["fp32_op"])


def test_a_cache_with_heads_first_reads_what_was_written():
    config = make_model().config
    ours, other = (
        PagedCache(config, 6, 16, dtype=torch.float32, device=torch.device("cpu"), heads_first=heads_first)
        for heads_first in (True, False)
    )
    keys, values = torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    for cache in (ours, other):
        cache.write(1, torch.arange(16, 36), keys, values)
        cache.copy([1, 2], [5, 6])
    found, expected = (cache.read(1, torch.tensor([5, 6, 1, 2]), 2, torch.float32) for cache in (ours, other))
    assert all(torch.equal(one, reference) for one, reference in zip(found, expected, strict=True))
    stored = ours.layer(1)[0].transpose(0, 1)
    assert stored.is_contiguous()
    assert torch.equal(stored[:, 1], keys[:16].transpose(0, 1))


@pytest.mark.parametrize(
    ("changes", "heads_first", "words"),
    [({}, False, "stored by blocks"), ({"head_dim": 8}, True, "narrower than 16")],
)
def test_what_it_cannot_compute_is_named(changes, heads_first, words):
    model = make_model(**changes)
    cache = PagedCache(model.config, 10, 16, dtype=torch.float32, device=torch.device("cpu"), heads_first=heads_first)
    with pytest.raises(ModelError, match=words):
        GraphDecoder(model, cache, model.logits, row_multiple=1)


@needs_cuda
def test_a_graph_gives_the_bits_of_the_step_it_captured(monkeypatch):
    model = make_model().cuda()
    engine = make_engine(model, kv_cache_tokens=1024)
    assert not engine.why_no_operator
    cache = PagedCache(model.config, 8, 64, dtype=torch.float32, device=torch.device("cuda"), heads_first=True)
    decoder = GraphDecoder(model, cache, model.logits, row_multiple=2)
    rows = []
    for number in range(3):
        sequence = Sequence(str(number), tokens(5 + number, number), 5 + number, GREEDY)
        sequence.block_table = [number + 1]
        rows.append(DecodeRow(sequence, 4 + number))
    first = decoder.hidden(rows)
    again = decoder.hidden(rows[::-1]).flip(0)
    assert torch.equal(first, again)
    eager = decoder._compute(decoder._steps[4].inputs)[:3].flip(0)
    assert torch.equal(first, eager)


@needs_cuda
def test_a_step_waits_for_nothing_on_the_host():
    model = make_model().cuda()
    engine = make_engine(model, kv_cache_tokens=1024)
    decoder = engine._runner._operator
    assert isinstance(decoder, GraphDecoder)
    sequence = Sequence("0", tokens(5, 0), 5, GREEDY)
    sequence.block_table = [1]
    decoder.hidden([DecodeRow(sequence, 4)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.hidden([DecodeRow(sequence, 4)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_there_is_no_decoder_without_triton():
    model = make_model()
    cache = PagedCache(model.config, 10, 16, dtype=torch.float32, device=torch.device("cpu"))
    decoder, reason = graph_decoder(model, cache, model.logits, 1)
    assert decoder is None
    assert "Triton" in reason
