"""Activations elsewhere, in the host's memory or in a file: what goes, what stays, and that it comes back."""

import gc
import os

import pytest
import torch
from torch import nn

from late_stream import LateDevice
from memory_references import solve_naive
from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.train.memory import offload
from modelwright.train.memory.activations import (
    ActivationCheckpointingConfig,
    BlockShape,
    Budget,
    Segment,
    block_choices,
    block_shape,
    peak,
    peak_bytes,
    solve,
    total_cost,
    total_recomputed_flops,
)
from modelwright.train.memory.checkpointing import checkpoint_segments, remove_checkpoints, segments_for
from modelwright.train.memory.offload import DiskStore, HostStore, offloading, open_store
from refusals import config_error

CONFIG = ModelConfig(
    vocab_size=64, num_layers=3, model_dim=64, num_heads=4, num_kv_heads=2, ffn_dim=192, head_dim=16, max_seq_len=256
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here"))]
SEGMENTS = {
    "kept": [(1, False)] * 3,
    "blocks": [(1, True)] * 3,
    "unit": [(3, True)],
    "one of them": [(1, False), (1, True), (1, False)],
}


class Noting:
    """A store that remembers what it was given."""

    def __init__(self) -> None:
        self.gone: list[torch.Tensor] = []

    def put(self, piece):
        kept = piece.clone()
        self.gone.append(kept)
        return lambda: kept


def test_activations_go_once_and_weights_and_shared_tensors_stay():
    store = Noting()
    linear, other = nn.Linear(256, 128, bias=False), nn.Linear(256, 64, bias=False)
    inputs, table, small = torch.randn(500, 256, requires_grad=True), torch.ones(500, 128), torch.randn(4)
    small.requires_grad_()
    with offloading([linear, other], [table], store):
        result = (linear(inputs) * table).sin().sum() + other(inputs).sum() + small.square().sum()
    assert sorted(tuple(t.shape) for t in store.gone) == [(500, 128), (500, 256)]
    result.backward()
    alone = inputs.detach().requires_grad_()
    ((linear(alone) * table).sin().sum() + other(alone).sum()).backward()
    assert torch.equal(inputs.grad, alone.grad)


def test_memory_that_is_used_again_is_another_tensor():
    """A tensor that lies where one that went away lay is not taken for it; one that was written to is not, either."""
    store, weight = HostStore(torch.device("cpu")), torch.ones((), requires_grad=True)
    with offloading([], [], store):
        total = torch.zeros(())
        for number in range(4):
            total = total + (torch.full((500, 256), float(number)) * weight).sum()
        written = torch.ones(500, 256)
        total = total + (written * weight).sum()
        written += 1
        total = total + (written * weight).sum()
    total.backward()
    assert weight.grad.item() == 500 * 256 * (0 + 1 + 2 + 3 + 1 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_gradients_are_the_same_bits(tier, device, segments, tmp_path):
    def gradients(store):
        torch.manual_seed(0)
        model = Decoder(CONFIG).to(device)
        model.init_weights(0)
        made = [Segment(num_layers=n, recompute=again, offload=store is not None) for n, again in SEGMENTS[segments]]
        checkpoint_segments(model, made, store=store)
        tokens = torch.arange(1024, device=device).view(4, 256) % 64
        positions = torch.arange(256, device=device).repeat(4, 1)
        documents_BT = (torch.arange(256, device=device) // 100).int().repeat(4, 1)
        for _ in range(2):
            hidden = model(tokens, positions, packed_attend(documents_BT))
            hidden.square().sum().backward()
        remove_checkpoints(model)
        return [p.grad for p in model.parameters()]

    store = HostStore(torch.device(device)) if tier == "host" else DiskStore(tmp_path)
    found = gradients(store)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(None), strict=True))
    if isinstance(store, DiskStore):
        assert store.written_bytes > 0
        assert os.listdir(tmp_path) == []


def test_copies_to_the_host_and_back_are_waited_for(monkeypatch):
    """On CUDA they run beside the computation; here as late as something waits for them."""
    device = LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(offload, "MOST_QUEUED_BYTES", 2**19)
    store, fetches = HostStore(torch.device("cpu")), []
    (stream,) = device.streams
    for number in range(6):
        piece = torch.full((2**16,), float(number))
        fetches.append(store.put(piece))
        del piece  # fails if this frees what is not copied yet
        assert stream.num_started - stream.num_done <= 3, "memory that has not left is bounded"
    assert stream.num_started - stream.num_done >= 2, "a tensor leaves while the next one is computed"
    assert fetches[5]().eq(5).all()
    assert stream.num_started == 6 + 1 + offload.READ_AHEAD
    assert stream.num_done < stream.num_started, "tensors that are read ahead are not waited for"
    for number in (4, 3, 3, 2, 1, 0):
        assert fetches[number]().eq(number).all()
    assert stream.num_started == 6 + 6 + 1, "each was read once, and the one that was asked for twice, twice"


def test_values_strides_and_formats_come_back_from_a_file(tmp_path):
    store = DiskStore(tmp_path)
    tensors = [
        torch.randn(300, 50).t(), torch.randn(4, 1).expand(4, 9), torch.randn(6, 8)[:, 2:5], torch.randn(33).bfloat16(),
        torch.arange(20, dtype=torch.int64).view(4, 5), torch.randn(2, 3, 4).permute(2, 0, 1), torch.tensor(2.5),
    ]  # fmt: skip
    fetches = [store.put(one) for one in tensors]
    store._writer.submit(int).result()
    for one, fetch in reversed(list(zip(tensors, fetches, strict=True))):
        for found in (fetch(), fetch()):
            assert torch.equal(found, one)
            assert found.dtype == one.dtype
            assert found.data_ptr() != one.data_ptr()
    assert fetches[0]().stride() == tensors[0].stride()


@pytest.mark.slow
def test_memory_is_given_up_and_the_file_is_used_again(tmp_path, monkeypatch):
    """No more waits to be written than is allowed; a second step takes no more of the file than the first."""
    monkeypatch.setattr(offload, "MOST_QUEUED_BYTES", 3 * 2**20)
    store, ends = DiskStore(tmp_path), []
    for step in range(3):
        fetches = []
        for number in range(20):
            fetches.append(store.put(torch.full((2**18,), float(100 * step + number))))
            held = [one for one in store._waiting.values() if one.held is not None]
            assert sum(one.num_bytes for one in held) <= 3 * 2**20 + 2**20
        for number in reversed(range(20)):
            assert fetches[number]().eq(100 * step + number).all()
        del fetches, held
        gc.collect()
        ends.append(store._end)
    assert ends[2] <= ends[0] + 4 * 2**20
    assert store.written_bytes == 3 * 20 * 2**20


def test_what_is_read_ahead_is_what_was_put_before(tmp_path):
    store = DiskStore(tmp_path)
    fetches = [store.put(torch.full((2**16,), float(n))) for n in range(6)]
    store._writer.submit(int).result()
    assert fetches[5]().eq(5).all()
    reading = {number for number, one in store._waiting.items() if one.reading is not None}
    assert reading == {3, 4}


def test_a_disk_that_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "MOST_QUEUED_BYTES", 0)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    store = DiskStore(tmp_path)
    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(ModelwrightError, match="--run-dir"):
        list(map(store.put, torch.ones(3, 2**18)))  # the newest is not waited for


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelwrightError, match=r"file/inside failed .* --run-dir"):
        DiskStore(tmp_path / "file" / "inside")


def test_a_model_on_the_host_is_refused():
    with config_error("offload"):
        open_store(ActivationCheckpointingConfig(offload="host"), device=torch.device("cpu"), folder=offload.Path())
    assert open_store(ActivationCheckpointingConfig(), device=torch.device("cpu"), folder=offload.Path()) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "budget", "budget_bytes": 1, "offload": "disk"}, "flops_per_byte: must be above 0"),
        ({"flops_per_byte": 3.0}, "flops_per_byte: "),
        ({"offload": "host", "offload_dir": "x"}, "offload_dir: "),
    ],
)
def test_settings_that_do_not_go_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        ActivationCheckpointingConfig(**changes)


def shape_of() -> BlockShape:
    return block_shape(CONFIG, compute="fp32", mean_context=128)


def test_a_budget_weighs_computing_again_against_moving():
    """Cheap moving is taken instead of computing again, dear moving is not."""
    shape, tokens, layers = shape_of(), 512, 6
    whole = tokens * (layers * shape.whole_bytes + shape.workspace_bytes)
    for flops_per_byte, moves in ((1e-3, True), (1e9, False)):
        config = ActivationCheckpointingConfig(
            mode="budget", budget_bytes=int(0.6 * whole), offload="disk", flops_per_byte=flops_per_byte
        )
        segments = segments_for(config, layers, shape=shape, num_tokens=tokens)
        assert any(segment.offload for segment in segments) == moves
        assert (total_recomputed_flops(shape, segments) > 0) != moves
        assert tokens * peak_bytes(shape, segments) <= config.budget_bytes


def test_moving_reaches_budgets_that_computing_again_cannot():
    shape, tokens, layers = shape_of(), 512, 12
    with_moving = ActivationCheckpointingConfig(mode="budget", budget_bytes=1, offload="disk", flops_per_byte=50.0)
    without = ActivationCheckpointingConfig(mode="budget", budget_bytes=1)
    least = {}
    for name, config in (("with", with_moving), ("without", without)):
        with config_error("budget_bytes", match="minimum is about") as told:
            segments_for(config, layers, shape=shape, num_tokens=tokens)
        least[name] = int(str(told.value).partition("about ")[2].split(";")[0])
    assert least["with"] < 0.9 * least["without"]


@pytest.mark.parametrize("flops_per_byte", [0.5, 20.0, 300.0])
def test_the_cheapest_of_all_ways_with_moving(flops_per_byte):
    shape, tokens = shape_of(), 512
    choices = block_choices(shape, tokens, 3, flops_per_byte=flops_per_byte)
    whole = tokens * (3 * shape.whole_bytes + shape.workspace_bytes)
    for share in (0.45, 0.6, 0.8):
        budget = Budget(num_bytes=int(share * whole))
        best, found = solve_naive(choices, 3, budget), solve(choices, 3, budget)
        assert best is not None
        assert peak(found, budget) <= budget.num_bytes
        assert total_cost(found) == pytest.approx(total_cost(best), rel=0.02)
