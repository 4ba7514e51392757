"""The run that `modelwright finetune` stands for: the recipe `finetune`, a model, data, and lengths that fit them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelwright.core.config import merge
from modelwright.core.errors import ConfigError
from modelwright.pipeline.fit_to_data import fitted_lengths
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run import previous_config
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.sft import SFT
from modelwright.recipes.load import Request, find_target, load

RECIPE = "finetune"
LORA: Mapping[str, Any] = {SFT.name: {"lora": {"r": 16}, "learning_rate": 2e-4}}
"""What `--lora` stands for: the rank of PEFT's examples, with the rate of QLoRA (Dettmers et al. 2023, table 9)."""


def finetune_request(
    model: str,
    sources: Sequence[str],
    overrides: Mapping[str, Any],
    run_dir: str = "",
    *,
    lora: bool = False,
    num_processes: int = 1,
    only: Sequence[str] = (),
) -> Request:
    """The request to fine-tune `model`, a Hugging Face folder or a run, on `sources`.

    lora: train low-rank adapters, which are merged into the model at the end; only: the stages named by `--stages`, as
    in `load`. A run that exists keeps the lengths that it was created with. Raises `ConfigError` and `DataError` as
    `load` does, and if the sources hold nothing to fine-tune on.
    """
    if not sources:
        raise ConfigError("finetune: name the files with the examples after the model: modelwright finetune MODEL DATA")
    found = find_model(find_target(model))
    names = {"name": _name(found.source.name, sources[0])}
    start = {"init_from": str(found.source.folder.resolve()), "data": {"sources": list(sources)}}
    settings = merge(merge(merge(names, start), LORA if lora else {}), overrides)
    request = load(RECIPE, settings, run_dir)
    previous = previous_config(request.run)
    if previous is not None and previous.has(SFT):
        lengths: Mapping[str, Any] = {
            "validation_tokens": previous.validation_tokens,
            PACK.name: {"seq_len": previous.section(PACK).seq_len},
            SFT.name: {"batch_tokens": previous.section(SFT).batch_tokens},
        }
    else:
        lengths = fitted_lengths(
            found.source.folder,
            request.config.data,
            settings,
            max_seq_len=request.config.model.max_seq_len,
            num_microbatches=request.config.section(SFT).gradient_accumulation_steps,
            num_processes=num_processes,
        )
    request = load(RECIPE, merge(lengths, settings), run_dir, only)
    return replace(request, origin=f"{request.origin}, model {model}")


def _name(model: str, source: str) -> str:
    """smollm-support for a model folder smollm and a file support.jsonl.zst."""
    stem = Path(source).name.partition(".")[0] or "data"
    return f"{model}-{''.join(c if c.isalnum() or c in '-_' else '-' for c in stem)}"
