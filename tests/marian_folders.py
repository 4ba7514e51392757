"""A folder as the project OPUS-MT publishes them: a `MarianTokenizer` with a SentencePiece model for each language and
one vocabulary, and a small Marian model that has learned some sentences by heart.
"""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import sentencepiece
import torch
import transformers

from modelwright.data.augment.masked_replacement import load_transformers

_EOS, _UNKNOWN, _PAD = "</s>", "<unk>", "<pad>"
_NUM_STEPS, _LEARNING_RATE = 200, 5e-3


def write_marian(folder: Path, translations: Mapping[str, str], texts: Iterable[tuple[str, str]]) -> None:
    """translations: what the model learns; texts: in both languages, from which the SentencePiece models are made."""
    folder.mkdir()
    sources, targets = zip(*texts, strict=True)
    pieces = dict.fromkeys([_EOS, _UNKNOWN])
    for name, its_texts in (("source", sources), ("target", targets)):
        pieces |= dict.fromkeys(_write_pieces(folder / f"{name}.spm", its_texts))
    vocabulary = {piece: number for number, piece in enumerate([*pieces, _PAD])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    torch.manual_seed(0)
    pad, eos = vocabulary[_PAD], vocabulary[_EOS]
    shape = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 128}
    special = {"pad_token_id": pad, "eos_token_id": eos, "decoder_start_token_id": pad, "forced_eos_token_id": eos}
    config = transformers.MarianConfig(
        vocab_size=len(vocabulary), dropout=0.0, init_std=0.1, scale_embedding=True, **shape, **heads, **special
    )
    model = transformers.MarianMTModel(config)
    model.generation_config.update(num_beams=6, max_length=128, bad_words_ids=[[pad]], renormalize_logits=True)
    model.save_pretrained(folder)
    _learn(folder, translations)


def _write_pieces(path: Path, texts: Iterable[str]) -> list[str]:
    """Make a SentencePiece model; returns its pieces without the special ones."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=content, vocab_size=300, hard_vocab_limit=False, minloglevel=2
    )
    path.write_bytes(content.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())
    return [processor.id_to_piece(number) for number in range(3, processor.get_piece_size())]


def _learn(folder: Path, translations: Mapping[str, str]) -> None:
    tokenizer, model = load_transformers(folder, "AutoModelForSeq2SeqLM", "folder")
    batch = tokenizer(list(translations), text_target=list(translations.values()), padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for step in range(_NUM_STEPS):
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * min(1.0, step / 20) * (1 - step / _NUM_STEPS)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
