"""Documents per second of each augmentation method, in one process with one thread, on texts of a machine's libraries.

    python benchmarks/augmentation.py [--documents 200] [--width 128] [--layers 2] [--wordnet /usr/share/wordnet]

Methods with a model get one with random weights, whose size is printed. What it writes is of no use but takes as long
as what a trained one writes; only a translation takes longer, because it ends at its greatest length. Seconds are those
of the CPU. A first batch, which loads what a method needs, does not count.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from modelwright.data.augment.methods import AUGMENTATIONS
from modelwright.data.augment.related_words import DEFAULT_FOLDER
from modelwright.data.document import Document
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import save_model
from modelwright.pipeline.augmenting import make_methods

CHARS, BATCH, CONTEXT = range(300, 3000), 16, 512


def write_models(folder: Path, texts: Sequence[str], width: int, layers: int) -> None:
    """Folders `marian`, `bert` and `own`, with one tokenizer; prints the sizes of the models."""
    tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=8192, special_tokens=("<mask>",)))
    size, eos, heads = tokenizer.vocab_size, tokenizer.eos_id, width // 32
    marian = transformers.MarianMTModel(transformers.MarianConfig(
        vocab_size=size, d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, encoder_attention_heads=heads, decoder_attention_heads=heads, pad_token_id=eos,
        eos_token_id=eos, decoder_start_token_id=eos, forced_eos_token_id=None, max_position_embeddings=CONTEXT,
    ))  # fmt: skip
    bert = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=CONTEXT,
    ))  # fmt: skip
    own = Decoder(ModelConfig(
        vocab_size=size, num_layers=layers, model_dim=width, num_heads=heads, num_kv_heads=heads, head_dim=32,
        ffn_dim=4 * width, max_seq_len=CONTEXT,
    ))  # fmt: skip
    own.init_weights(0)
    save_model(own, folder / "own")
    tokenizer.save(folder / "own")
    end = tokenizer.decode([eos], skip_special=False)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "own/tokenizer.json"), eos_token=end, pad_token=end, mask_token="<mask>"
    )
    for name, model in (("marian", marian), ("bert", bert)):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    for name, model in (("marian", marian), ("bert", bert), ("own", own)):
        print(f"{name}: {sum(one.numel() for one in model.parameters()) / 1e6:.2f} million parameters")


def rate(name: str, settings: Mapping[str, Any], documents: Mapping[str, Sequence[Document]]) -> float:
    """Documents per CPU second of a method."""
    (method,) = make_methods([name], settings)
    given, seconds = documents["code" if "code" in method.kinds else "prose"], 0.0
    for start in range(0, len(given), BATCH):
        batch = given[start : start + BATCH]
        began = time.process_time()
        method.change(batch, [Random(number) for number in range(len(batch))])
        seconds += time.process_time() - began if start else 0.0
    return (len(given) - BATCH) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200, help="of each kind, at most")
    parser.add_argument("--width", type=int, default=128, help="of the models; a multiple of 32")
    parser.add_argument("--layers", type=int, default=2, help="of the models")
    parser.add_argument("--wordnet", type=Path, default=DEFAULT_FOLDER)
    given = parser.parse_args()
    torch.set_num_threads(1)
    corpus = [one for one in machine_corpus(fraction=1.0, skip=lambda reason, file: None) if len(one.text) in CHARS]
    documents: dict[str, list[Document]] = {}
    for kind in ("prose", "code"):
        found = [one for one in corpus if one.kind == kind]
        documents[kind] = Random(0).sample(found, min(len(found), given.documents + BATCH))
        mean = sum(len(one.text) for one in documents[kind]) / len(documents[kind])
        print(f"{kind}: {len(documents[kind]) - BATCH} documents of {mean:,.0f} characters")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_models(folder, [one.text for one in corpus], given.width, given.layers)
        marian, bert, own, cache = (str(folder / name) for name in ("marian", "bert", "own", "cache"))
        settings = {
            one.name: {"wordnet": str(given.wordnet)} for one in AUGMENTATIONS if hasattr(one.config, "wordnet")
        }
        settings["back_translation"] = {"forward": marian, "backward": marian, "cache": cache}
        settings |= {"masked_replacement": {"model": bert}, "span_infilling": {"model": own}}
        print("\n| method | documents per second |\n| --- | --- |")
        for spec in AUGMENTATIONS:
            with multiprocessing.get_context("fork").Pool(1) as fresh:  # methods share caches within a process
                speed = fresh.apply(rate, (spec.name, settings, documents))
            print(f"| `{spec.name}` | {speed:,.{0 if speed >= 10 else 2}f} |", flush=True)


if __name__ == "__main__":
    main()
