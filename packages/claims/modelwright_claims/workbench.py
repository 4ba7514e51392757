"""The text and the models that training claims share.

The text is documentation and code of this interpreter's own libraries, split by module and tokenized once per call of
`prove`. Of the held-out text, "validation" is for tuning and "test" for the figures that are reported.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig, pack
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import default_device
from modelwright.train.config import TrainConfig
from modelwright.train.precision.policy import PrecisionConfig
from modelwright_claims.claim import Setting

VOCAB_SIZE = 512
"""Small, so that a short run learns more than the frequencies of tokens."""
Mode = Literal["best_fit", "one_per_row", "length_buckets"]
HeldOut = Literal["validation", "test"]
Split = Literal["train", "validation", "test"]
TextKind = Literal["prose", "code"]
KINDS: tuple[TextKind, ...] = ("prose", "code")
TOKENIZER, TRAIN_TEXTS = "tokenizer", "train.json"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a training run of a claim."""

    model_dim: int
    num_layers: int
    seq_len: int
    batch_rows: int
    num_steps: int
    learning_rate: float = 1e-3

    @property
    def batch_tokens(self) -> int:
        return self.batch_rows * self.seq_len

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Heads of 32, two query heads to a key/value head, FFN of 8/3 the width in multiples of 32."""
        num_heads = self.model_dim // 32
        return ModelConfig(
            vocab_size=vocab_size,
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            num_heads=num_heads,
            num_kv_heads=num_heads // 2,
            ffn_dim=self.model_dim * 8 // 3 // 32 * 32,
            head_dim=32,
            max_seq_len=self.seq_len,
        )

    def train_config(self, **changes: Any) -> TrainConfig:
        """FP32, warmup and cosine, no checkpoints in between; `changes` are the subject of the claim."""
        config = TrainConfig(
            num_steps=self.num_steps,
            batch_tokens=self.batch_tokens,
            learning_rate=self.learning_rate,
            precision=PrecisionConfig(policy="fp32"),
            eval_every_steps=0,
            checkpoint_every_minutes=0,
            keep_best=False,
        )
        return replace(config, **changes)

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return words for a result's conditions."""
        parameters = self.model_config(VOCAB_SIZE).num_parameters
        return {
            "parameters": parameters,
            "steps": self.num_steps,
            "batch": f"{self.batch_rows} rows of {self.seq_len} tokens",
            "text": "documentation of the interpreter's libraries, split by module",
        }


def size(setting: Setting) -> Size:
    """The bench's usual run: some seconds in quick mode, about half a minute otherwise (one core)."""
    if setting.quick:
        return Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=150)
    return Size(model_dim=128, num_layers=2, seq_len=256, batch_rows=4, num_steps=300)


def device() -> torch.device:
    """Return where claims are measured: CUDA where there is one."""
    return default_device()


@dataclass(frozen=True, kw_only=True)
class Text:
    """Tokenized documents of one kind."""

    vocab_size: int
    eos_id: int
    train: list[list[int]]
    validation: list[list[int]]
    test: list[list[int]]


def prepare_text(setting: Setting, kind: TextKind = "prose") -> Text:
    """Return the documents of one kind as token ids; they are read and tokenized once per `setting.folder`."""
    path = setting.folder / f"{kind}.json"
    if not path.exists():
        setting.progress.note("reading and tokenizing the interpreter's documentation and code")
        texts = read_text(fraction=0.15 if setting.quick else 1.0, vocab_size=VOCAB_SIZE, heldout_bytes=150_000)
        for name, text in texts.items():
            write_atomic(setting.folder / f"{name}.json", json.dumps(vars(text)))
    return Text(**json.loads(path.read_text(encoding="utf-8")))


def read_text(*, fraction: float, vocab_size: int, heldout_bytes: int) -> dict[TextKind, Text]:
    """Return prose and code of a share of the interpreter's modules, as ids of a tokenizer trained on the prose.

    Held-out documents are thinned out to about `heldout_bytes` per split; they go to validation and test in turn.
    """
    documents: dict[tuple[str, str], list[str]] = {
        (kind, split): [] for kind in KINDS for split in ("train", "heldout")
    }
    for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None):
        if document.kind in KINDS:
            documents[document.kind, document.split].append(document.text)
    tokenizer = train_tokenizer(documents["prose", "train"], TokenizerConfig(vocab_size=vocab_size))

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids in tokenizer.encode_documents(texts)]

    result: dict[TextKind, Text] = {}
    for kind in KINDS:
        heldout = documents[kind, "heldout"]
        heldout = heldout[:: max(1, sum(map(len, heldout)) // (2 * heldout_bytes))]
        result[kind] = Text(
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            train=encode(documents[kind, "train"]),
            validation=encode(heldout[0::2]),
            test=encode(heldout[1::2]),
        )
    return result


def distinct_prose(
    *, fraction: float, takes: Callable[[str], bool], change: Callable[[str], str] = str
) -> tuple[list[str], list[str]]:
    """Return the distinct prose of a share of the interpreter's modules that is taken after a change: what is there to
    train on, and what is held out and not among it.
    """
    found: dict[str, dict[str, None]] = {"train": {}, "heldout": {}}
    for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None):
        text = change(document.text)
        if document.kind == "prose" and takes(text):
            found[document.split][text] = None
    return list(found["train"]), [text for text in found["heldout"] if text not in found["train"]]


def store_text(folder: Path, texts: Mapping[Split, Sequence[str]], tokenizer: Tokenizer) -> None:
    """Put prose of a claim's own into the folder of a `Setting`, where `prepare_text` finds it instead of the usual
    text; the tokenizer and the texts to train on stay next to it (`TOKENIZER`, `TRAIN_TEXTS`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / TOKENIZER)
    write_atomic(folder / TRAIN_TEXTS, json.dumps(texts["train"]))
    ids = {split: [one.tolist() for one in tokenizer.encode_documents(of_split)] for split, of_split in texts.items()}
    text = Text(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, **ids)
    write_atomic(folder / "prose.json", json.dumps(vars(text)))


def packed_rows(setting: Setting, *, seq_len: int, mode: Mode, split: Split, kind: TextKind = "prose") -> PackedRows:
    """Return the documents of a split as rows; they are packed once per `setting.folder`."""
    folder = setting.folder / f"{kind}-{split}-{mode}-{seq_len}"
    if not folder.exists():
        text = prepare_text(setting, kind)
        sequences = ((ids, None) for ids in getattr(text, split))
        config = PackConfig(seq_len=seq_len, mode=mode)
        pack(sequences, folder, config, vocab_size=text.vocab_size, eos_id=text.eos_id)
    return PackedRows(folder)


def real_token_share(setting: Setting, size: Size, *, mode: Mode) -> float:
    """Return the share of the tokens in training rows that are not padding."""
    rows = packed_rows(setting, seq_len=size.seq_len, mode=mode, split="train")
    return rows.num_tokens / (rows.num_rows * rows.seq_len)
