"""Whole runs whose activations wait in a file: the bits of ordinary runs, stops, and a file that cannot be written."""

import errno
import os

import pytest
import torch

from modelwright.core.config import ModelwrightError
from modelwright.ops import cpu_kernels
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.train.memory import offload
from modelwright.train.memory.activations import block_shape, head_workspace_bytes
from modelwright.train.memory.offload import DiskStore

KINDS = {
    "kept": {},
    "units": {"mode": "full", "layers_per_segment": 1},
    "operators": {"mode": "selective", "save_outputs_of": ["attend", "up_proj"]},
}


@pytest.fixture
def all_sizes_go(monkeypatch):
    """Tiny tensors too; nothing waits to be written, so that all of it is read again."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    monkeypatch.setattr(offload, "MOST_QUEUED_BYTES", 0)


@pytest.fixture
def stores(monkeypatch) -> list[DiskStore]:
    found: list[DiskStore] = []

    def noted(folder):
        found.append(DiskStore(folder))
        return found[-1]

    monkeypatch.setattr(offload, "DiskStore", noted)
    return found


def weights(tiny, tmp_path, name, **settings):
    tiny.run(tmp_path / name, tiny.settings(gradient_accumulation_steps=2, **settings), heldout=[])
    return tiny.final_weights(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["fp32", "bf16_mixed"])
def test_the_same_bits_as_without(tiny, tmp_path, all_sizes_go, stores, kind, policy):
    common = {"precision": {"policy": policy}}
    here = weights(tiny, tmp_path, "here", activation_checkpointing=KINDS[kind], **common)
    there = weights(tiny, tmp_path, "there", activation_checkpointing={**KINDS[kind], "offload": "disk"}, **common)
    assert all(torch.equal(here[name], there[name]) for name in here)
    (store,) = stores
    assert store.read_bytes > 0


def test_a_budget_moves_what_is_cheaper_to_move(tiny, tmp_path, all_sizes_go, stores):
    """Half a block's share too little for all of them to keep everything."""
    model = tiny.tiny_model().config
    shape = block_shape(model, compute="fp32", mean_context=16, fused=cpu_kernels.are_used_on("cpu"))
    tokens = tiny.settings().batch_tokens // 2
    head = head_workspace_bytes(model, num_tokens=tokens, chunk_tokens=CHUNK_TOKENS)
    most = tokens * shape.whole_bytes * model.num_layers + max(head, tokens * shape.workspace_bytes)
    budget = most - tokens * shape.whole_bytes // 2
    moving = {"mode": "budget", "budget_bytes": budget, "offload": "disk", "flops_per_byte": 1e-6}
    found = weights(tiny, tmp_path, "budget", activation_checkpointing=moving)
    plain = weights(tiny, tmp_path, "plain")
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    (store,) = stores
    assert (store.folder, store.written_bytes > 0) == (tmp_path / "budget", True)


def test_another_folder_and_nothing_left_in_it(tiny, tmp_path, all_sizes_go, stores):
    weights(
        tiny, tmp_path, "run", activation_checkpointing={"offload": "disk", "offload_dir": str(tmp_path / "scratch")}
    )
    assert os.listdir(tmp_path / "scratch") == []
    assert stores[0].folder == tmp_path / "scratch"


def test_a_full_disk_ends_the_run_with_one_clear_error(tiny, tmp_path, all_sizes_go, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ModelwrightError, match=r"activation_checkpointing\.offload: .*No space left"):
        weights(tiny, tmp_path, "run", activation_checkpointing={"offload": "disk"})
