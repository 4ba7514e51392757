"""init: imports a Hugging Face folder into the run, model and tokenizer, checked once. Also the complete model folders
of all stages: weights, shape, tokenizer, and stop tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from modelwright.core.artifacts import RunDir, verify_if_artifact
from modelwright.core.config import ConfigError, ModelError, hub_hint
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model, save_model, stored_dtype
from modelwright.pipeline.stage import RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import fixed_estimate


def save_model_folder(
    model: Decoder, tokenizer: Tokenizer, folder: Path, *, save: Callable[..., None] = save_model
) -> None:
    """Write a folder in the Hugging Face layout that is ready for loading and chat. save: writes the weights."""
    pad = tokenizer.special_tokens.get("pad_token")
    pad_id = tokenizer.id_of(pad) if pad else None
    save(model, folder, eos_id=tokenizer.eos_id, bos_id=tokenizer.bos_id, pad_id=pad_id)
    tokenizer.save(folder, max_length=model.config.max_seq_len)


def initial_folder(init_from: str) -> Path:
    """Returns the folder that `init_from` names. Raises `ConfigError` if it is not a folder."""
    folder = Path(init_from).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"init_from: {init_from} is not a folder; give the path of a model folder in the Hugging Face "
            f"layout{hub_hint(init_from)}"
        )
    return folder


def folder_fingerprint(folder: Path, setting: str) -> list[list[str | int]]:
    """Returns name, size and modification time of each file of a model folder on which the model's outputs depend.
    setting: names the folder. Raises `ConfigError` if it is not a folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{setting}: {folder} is not a folder; give a Hugging Face model folder on disk")
    # Not a hash of the contents: it would read gigabytes before each start of the run.
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Artifact: the model and its tokenizer in the Hugging Face layout. Facts: the folder that they came from and, if a
    stage wrote that, `content`, its digest."""
    folder = Path(config.init_from)

    def import_model(context: StageContext) -> None:
        context.progress.begin("init", 0, "tensors")
        manifest = verify_if_artifact(folder)
        model, tokenizer = load_model(folder, dtype=stored_dtype(folder)), Tokenizer.load(folder)
        # A larger vocabulary of the model is padding; a smaller one has no embedding for some tokens.
        if tokenizer.vocab_size > model.config.vocab_size:
            raise ModelError(
                f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, its model only "
                f"{model.config.vocab_size}; they do not match"
            )
        save_model_folder(model, tokenizer, context.output.path)
        context.output.facts |= {"folder": str(folder), "num_parameters": model.config.num_parameters}
        if manifest is not None:
            context.output.facts["content"] = manifest.content_digest
        context.progress.end()

    return Stage(
        name=INIT.name,
        title=INIT.title,
        settings={"files": folder_fingerprint(folder, "init_from")},
        parents=(),
        run=import_model,
    )


INIT = StageSpec(
    name="init",
    title="Importing the initial model",
    with_init_from="only",
    model_title="initial model",
    build=_build,
    estimate=lambda config, run, rates: fixed_estimate("init", seconds=2.0),
)
