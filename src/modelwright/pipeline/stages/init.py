"""init: imports a Hugging Face folder into the run, model and tokenizer, checked once."""

from collections.abc import Sequence
from pathlib import Path

from modelwright.core.artifacts import verify_if_artifact
from modelwright.core.errors import ModelError
from modelwright.core.rundir import RunDir
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_model, stored_dtype
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import fixed_estimate
from modelwright.pipeline.stages.model_folder import folder_fingerprint, save_model_folder


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
