"""tokenize: a byte-level BPE tokenizer trained on the kept training text."""

from collections.abc import Sequence
from itertools import islice

from modelwright.core.artifacts import RunDir
from modelwright.core.config import dump
from modelwright.data.clean.folder import read_kept
from modelwright.data.tokenizer.tokenizer import train_tokenizer
from modelwright.pipeline.stage import RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.estimates import moving_estimate
from modelwright.pipeline.stages.imported import imported_stage

FERTILITY_DOCUMENTS = 400
BYTES_PER_S = 5e6
NOTHING_HELD_OUT = (
    "no document is held out, so neither the tokenizer nor the model is measured on text that it was not trained on; "
    "add documents, or raise data.validation_fraction"
)


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Artifact: the tokenizer in the Hugging Face layout. Facts: size, bytes per token on held-out text."""
    if config.rows_from:
        return imported_stage(config, TOKENIZE)

    def train(context: StageContext) -> None:
        clean = context.parents[CLEAN.name]
        context.progress.begin("tokenizer", 0, "documents")
        texts = (document.text for document in read_kept(clean, split="train"))
        tokenizer = train_tokenizer(texts, config.tokenizer)
        tokenizer.save(context.output.path, max_length=config.model.max_seq_len)
        # Held out, because text that the merges were learned from is shorter in tokens than new text
        fertility: dict[str, float] = {}  # bytes per token by kind, on the first held-out documents of each
        for kind in ("prose", "code", "qa"):
            documents = islice(read_kept(clean, split="heldout", kinds=(kind,)), FERTILITY_DOCUMENTS)
            if texts := [document.text for document in documents]:
                num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
                fertility[kind] = sum(len(text.encode("utf-8")) for text in texts) / max(1, num_tokens)
        context.output.facts |= {"vocab_size": tokenizer.vocab_size, "bytes_per_token": fertility}
        context.progress.end()
        shown = ", ".join(f"{kind} {value:.2f}" for kind, value in fertility.items())
        quality = f"bytes per token on held-out text: {shown}" if shown else NOTHING_HELD_OUT
        context.progress.note(f"tokenizer: {tokenizer.vocab_size:,} tokens; {quality}")

    return Stage(
        name=TOKENIZE.name,
        title=TOKENIZE.title,
        # Empty special tokens are left out, so that the digest is that of runs from before the setting existed.
        settings={name: value for name, value in dump(config.tokenizer).items() if name != "special_tokens" or value},
        parents=(CLEAN.name,),
        run=train,
    )


TOKENIZE = StageSpec(
    name="tokenize",
    title="Training the tokenizer",
    needs=lambda config: () if config.rows_from else (CLEAN.name,),
    with_init_from="never",
    build=_build,
    estimate=lambda config, run, rates: moving_estimate("tokenize", config, bytes_per_s=BYTES_PER_S),
)
