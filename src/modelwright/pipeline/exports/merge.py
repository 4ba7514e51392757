"""A model folder with the adapter of another folder merged into its weights."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelwright.compress.int8 import is_int8_folder
from modelwright.core.artifacts import MANIFEST, write_atomic
from modelwright.core.config import ConfigError
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.adapters import attach_adapters, merge_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.hf import (
    WEIGHTS,
    WEIGHTS_INDEX,
    hf_weights,
    load_model,
    read_json,
    save_tensors,
    set_parameter,
    stored_dtype,
)
from modelwright.model.peft_folder import CONFIG, TENSORS, read_adapter
from modelwright.pipeline.exports.export import replaced

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class MergedFolder:
    """A written model folder, and remarks for the user about what is unusual in it."""

    folder: Path
    notes: Sequence[str]


def merge_folder(
    source: Path, adapter: Path, target: Path, *, dtype: str = "", overwrite: bool = False
) -> MergedFolder:
    """Writes the model of `source` with the adapter to `target`, atomically. The sums are in FP32 and rounded once, to
    `dtype`, one of `DTYPES`; "" for the format of the source. Other settings and files are those of the source; the
    files of a tokenizer in the adapter's folder replace its own, because training may have added tokens.

    Raises `ConfigError` for a wrong option and `ModelError` for an adapter that does not fit the model.
    """
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    if is_int8_folder(source):
        raise ConfigError(f"{source}: its weights are quantized; merge into the model that was quantized")
    for folder in (source, adapter):
        if target.resolve() == folder.resolve():
            raise ConfigError(f"{target}: is read for the merge, so it is not replaced; choose another folder")
    if not (adapter / CONFIG).is_file():
        raise ConfigError(f"{adapter}: is not the folder of an adapter (no {CONFIG} in it)")
    written = DTYPES[dtype] if dtype else stored_dtype(source)
    # FP64 stays: rounding to FP32 in between would lose what the source has.
    model, notes = merged_model(source, adapter, dtype=torch.promote_types(written, torch.float32))
    config = {name: value for name, value in read_json(source / "config.json").items() if name != "torch_dtype"}
    config |= {
        "dtype": str(written).removeprefix("torch."),
        "tie_word_embeddings": model.config.tie_embeddings,
        "vocab_size": model.config.vocab_size,
    }
    with replaced(target, holds="config.json", overwrite=overwrite) as draft:
        tokens = adapter if (adapter / TOKENIZER).is_file() else source
        for folder in dict.fromkeys((source, tokens)):
            for path in sorted(folder.iterdir()):
                is_weights = path.suffix in (".safetensors", ".bin", ".pt") or path.name == WEIGHTS_INDEX
                is_own = path.name in (MANIFEST, CONFIG, TENSORS, "training_args.bin", "trainer_state.json")
                if path.is_file() and not is_weights and not is_own and (folder is source or path.name != "README.md"):
                    shutil.copyfile(path, draft.path / path.name)
        if tokens is adapter and (draft.path / "tokenizer_config.json").is_file():
            Tokenizer.load(draft.path).save(draft.path)  # its stop tokens join those of the generation_config.json
        write_atomic(draft.path / "config.json", json.dumps(config, indent=2) + "\n")
        save_tensors(draft.path / WEIGHTS, {name: one.to(written) for name, one in hf_weights(model).items()})
    if tokens is adapter:
        notes.append(f"Tokenizer: that of {adapter}")
    return MergedFolder(target, notes)


def merged_model(source: Path, adapter: Path, *, dtype: torch.dtype) -> tuple[Decoder, list[str]]:
    """Returns the model with the adapter in its weights, which have `dtype`, and remarks. Raises `ModelError` as
    `read_adapter` does.
    """
    model, notes = load_model(source, dtype=dtype), list[str]()
    read = read_adapter(model, adapter)
    if read.config.r:
        attach_adapters(model, read.config, seed=0)
        with torch.no_grad():
            for name, value in read.values.items():
                model.get_parameter(name).copy_(value)
        merge_adapters(model)
    if read.weights:
        ends = {"embedding.weight", "head.weight"} & read.weights.keys()
        unties = model.config.tie_embeddings and len(ends) == 1 and not read.ties_ends
        if unties:
            # As in PEFT: the module that was trained has its own weights, the other one keeps those of the base.
            notes.append(f"Output head: no longer the embedding, because the adapter trained {next(iter(ends))} alone")
        # Both trained: they may differ.
        is_tied = model.config.tie_embeddings and not unties and len(ends) < 2
        vocab_size = read.weights[next(iter(ends))].shape[0] if ends else model.config.vocab_size
        base = dict(model.named_parameters())
        with torch.device("meta"):
            model = Decoder(replace(model.config, tie_embeddings=is_tied, vocab_size=vocab_size))
        weights = {name: value.to(dtype) for name, value in read.weights.items()}
        if is_tied and ends:
            weights = {"embedding.weight" if name in ends else name: value for name, value in weights.items()}
        base.setdefault("head.weight", base["embedding.weight"])
        for name in [name for name, _ in model.named_parameters()]:
            set_parameter(model, name, weights.get(name, base[name].detach().clone()))
    return model, notes
