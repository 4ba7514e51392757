"""The bench that training claims share: a small text, a small model, and runs of THE loop on them.

Text: documentation of this interpreter's own libraries, split by module, tokenized once per call of `prove`. Every run
of a seed starts from the same weights and takes the rows in the same order. Knows no technique.
"""

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.builtin import machine_corpus
from modelwright.data.loader import PackedLoader, PackedRows
from modelwright.data.pack import PackConfig, pack
from modelwright.data.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright.parallel.mesh import default_device, single
from modelwright.precision.policy import PrecisionConfig
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.technique import StepInfo, Technique
from modelwright.train.techniques.adaptive_precision import CHANGES, MACHINE
from modelwright_claims.claim import Setting

VOCAB_SIZE = 512
"""Small: what a short run learns is then more than the frequencies of tokens."""
NUM_UNTIMED_STEPS = 3
Mode = Literal["best_fit", "pad"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a training run of a claim is."""

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
        """Heads of 32, two query heads to a key/value head, FFN of 8/3 the width."""
        num_heads = self.model_dim // 32
        return ModelConfig(
            vocab_size=vocab_size,
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            num_heads=num_heads,
            num_kv_heads=num_heads // 2,
            ffn_dim=self.model_dim * 8 // 3 // 16 * 16,
            head_dim=32,
            max_seq_len=self.seq_len,
        )

    def train_config(self, **changes: Any) -> TrainConfig:
        """FP32, warmup and cosine, no checkpoints in between; `changes` are what the claim is about."""
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
        """For a result's conditions."""
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
    """Where claims are measured: CUDA where there is one."""
    return default_device()


@dataclass(frozen=True, kw_only=True)
class Text:
    """Tokenized documents."""

    vocab_size: int
    eos_id: int
    train: list[list[int]]
    heldout: list[list[int]]


def prepare_text(setting: Setting) -> Text:
    """Documents as token ids; made once in `setting.folder`."""
    path = setting.folder / "text.json"
    if not path.exists():
        setting.progress.note("reading and tokenizing the interpreter's documentation")
        fraction = 0.15 if setting.quick else 0.7
        text = read_text(fraction=fraction, vocab_size=VOCAB_SIZE, heldout_bytes=150_000)
        path.write_text(json.dumps(vars(text)), encoding="utf-8")
    return Text(**json.loads(path.read_text(encoding="utf-8")))


def read_text(*, fraction: float, vocab_size: int, heldout_bytes: int) -> Text:
    """The prose of a share of the interpreter's modules, as token ids of a tokenizer trained on its training side.

    Held-out documents are thinned out evenly to about `heldout_bytes`.
    """
    chosen: dict[str, list[str]] = {"train": [], "heldout": []}
    for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None):
        if document.kind == "prose":
            chosen[document.split].append(document.text)
    every = max(1, sum(map(len, chosen["heldout"])) // heldout_bytes)
    chosen["heldout"] = chosen["heldout"][::every]
    tokenizer = train_tokenizer(chosen["train"], TokenizerConfig(vocab_size=vocab_size))
    ids = {split: [ids.tolist() for ids in tokenizer.encode_documents(texts)] for split, texts in chosen.items()}
    return Text(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, train=ids["train"], heldout=ids["heldout"])


def packed_rows(
    setting: Setting, text: Text, *, seq_len: int, mode: Mode, split: Literal["train", "heldout"]
) -> PackedRows:
    """The documents of a split as rows; made once in `setting.folder`."""
    folder = setting.folder / f"{split}-{mode}-{seq_len}"
    if not folder.exists():
        sequences = ((ids, None) for ids in getattr(text, split))
        config = PackConfig(seq_len=seq_len, mode=mode)
        pack(sequences, folder, config, vocab_size=text.vocab_size, eos_id=text.eos_id)
    return PackedRows(folder)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run gave. Tokens leave padding out; times leave the first steps out, but for those by step;
    formats: the last ones of the parts whose format changed."""

    heldout_loss: float
    tokens_per_s: float
    step_s: float
    times_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)

    def pace(self, first: int) -> float:
        """Tokens per second of all steps from this one on, whatever was done in between."""
        return sum(self.tokens[first:]) / sum(self.times_s[first:])


@dataclass
class Clock:
    """Keeps every step's time and tokens."""

    every: int = 1
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return statistics.median(self.times_s[NUM_UNTIMED_STEPS:])

    @property
    def tokens_per_s(self) -> float:
        return statistics.fmean(self.tokens[NUM_UNTIMED_STEPS:]) / self.step_s

    def observe(self, info: StepInfo) -> None:
        self.times_s.append(info.step_time_s)
        self.tokens.append(info.num_tokens)

    def state_dict(self) -> dict[str, Any]:
        return {"times_s": self.times_s, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.times_s, self.tokens = list(state["times_s"]), list(state["tokens"])


def run(
    setting: Setting,
    text: Text,
    size: Size,
    config: TrainConfig,
    *,
    seed: int,
    mode: Mode = "best_fit",
    model: Decoder | None = None,
    machine: Path | None = None,
) -> Run:
    """One run of THE loop from `seed`'s weights in `seed`'s order; loss on the held-out documents, always packed.

    model: of the caller's, which is initialised and trained in place; machine: of a run whose measured speeds of
    formats adaptive precision goes by, instead of its own.
    """
    model = model or Decoder(size.model_config(text.vocab_size))
    model.init_weights(derive_seed(seed, "weights"))
    rows = packed_rows(setting, text, seq_len=size.seq_len, mode=mode, split="train")
    heldout = packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="heldout")
    loader = PackedLoader(rows, batch_rows=size.batch_rows, seed=derive_seed(seed, "order"))
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        if machine is not None:
            shutil.copy(machine, Path(folder) / MACHINE)
        result = train(
            model,
            Pretrain(loader),
            config,
            num_steps=config.num_steps,
            world=single(device()),
            stage=StageDir(Path(folder)),
            seed=seed,
            name=f"seed {seed}",
            input_digest="claim",
            progress=setting.progress,
            heldout=list(heldout.batches(32)),
            techniques=[Technique(name="clock", on_step_end=clock.observe)],
        )
        changes = Path(folder) / CHANGES
        lines = changes.read_text(encoding="utf-8").splitlines() if changes.exists() else []
    return Run(
        heldout_loss=result.heldout_loss,
        tokens_per_s=clock.tokens_per_s,
        step_s=clock.step_s,
        times_s=tuple(clock.times_s),
        tokens=tuple(clock.tokens),
        formats={change["part"]: change["to"] for change in map(json.loads, lines)},
    )


def real_token_share(setting: Setting, text: Text, size: Size, *, mode: Mode) -> float:
    """Share of the tokens in training rows that are not padding."""
    rows = packed_rows(setting, text, seq_len=size.seq_len, mode=mode, split="train")
    return rows.num_tokens / (rows.num_rows * rows.seq_len)
