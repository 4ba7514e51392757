"""Reading of model folders: memory, and folders that are damaged or incomplete."""

import json
import struct
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelwright.core.config import ModelError
from modelwright.model.hf import StoredWeights, deferred_model, load_config, load_model, save_model, stored_dtype
from rank_processes import fork_context
from tiny_decoder import make_decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(make_decoder(), tmp_path / "model")
    return tmp_path / "model"


def resident_bytes() -> int:
    """Memory of this process, mapped weights included, resident or swapped; without libraries, whose pages come and go
    as other processes need memory.
    """
    num_kib, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            counts = not line.partition("/")[2] or line.endswith(".safetensors")
        elif counts and name in ("Rss:", "Swap:"):
            num_kib += int(values[0])
    return 1024 * num_kib


def memory_of_loading(folder: Path, first: Path) -> tuple[int, int]:
    """Bytes of the model's weights, and by how much this process was larger at most while it read them."""
    load_model(first)  # what is imported on first use
    moments: list[int] = []
    read = StoredWeights.read

    def watched(self: StoredWeights, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        piece = read(self, name, part)
        moments.append(resident_bytes())
        return piece

    StoredWeights.read = watched
    before = resident_bytes()
    model = load_model(folder)
    return 4 * model.config.num_parameters, max(moments) - before


@pytest.mark.slow
def test_memory_holds_the_model_and_one_tensor_more(tmp_path: Path) -> None:
    """Measured at every tensor, while it is in memory in both formats, in processes that have done nothing else. The
    system's own noise only adds, so the smallest of three figures counts, and the first that is small enough will do.
    """
    small, large = tmp_path / "small", tmp_path / "large"
    save_model(make_decoder().bfloat16(), small)
    shape = {"vocab_size": 4096, "num_layers": 10, "model_dim": 256, "ffn_dim": 2048, "tie_embeddings": False}
    model = make_decoder(**shape).bfloat16()
    save_model(model, large)
    largest = max(4 * parameter.numel() for parameter in model.parameters())
    with ProcessPoolExecutor(1, mp_context=fork_context(), max_tasks_per_child=1) as process:
        for _ in range(3):
            wanted, added = process.submit(memory_of_loading, large, small).result()
            if added < wanted + 2 * largest + 2**23:
                break
        else:
            pytest.fail("whole files beside the model would be half as much more")
    assert wanted > 60 * 2**20
    assert 2 * wanted / 4 > 2 * largest + 2**23


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_format_of_a_folder_is_in_its_headers(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(make_decoder().to(dtype), tmp_path)
    assert stored_dtype(tmp_path) == dtype
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"].float()}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == torch.float32


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="10KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=rf"{shard.name}: a shard named in model.safetensors.index.json is missing"):
        load_model(tmp_path)


def test_a_flipped_byte_in_the_header_is_noticed(folder: Path) -> None:
    """Whichever byte of the header it is: the file, a tensor's name or its shape are not what they were."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (header_len,) = struct.unpack("<Q", whole[:8])
    for place in range(0, 8 + header_len, max(1, header_len // 40)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x20
        path.write_bytes(damaged)
        if _means_the_same(whole[8 : 8 + header_len], bytes(damaged[8 : 8 + header_len])):
            continue
        with pytest.raises(ModelError, match=r"model"):
            load_model(folder)


def _means_the_same(left: bytes, right: bytes) -> bool:
    """Whether a header says the same of the tensors: the file's own description is not used."""
    try:
        parts = [json.loads(header) for header in (left, right)]
    except ValueError:
        return False
    for part in parts:
        part.pop("__metadata__", None)
    return parts[0] == parts[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that are not finite"):
        load_model(folder)
    deferred_model(folder)  # reads no weight


def test_integers_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds torch\.int32 instead of floating-point"):
        load_model(folder)


def test_an_unknown_type_is_named_with_those_that_are_known(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mamba"}))
    with pytest.raises(ModelError, match=r"config\.json: model_type is 'mamba'.* llama, qwen2, qwen3, mistral, gemma2"):
        load_config(folder)
