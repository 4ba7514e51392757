"""Runs with and without sparse updates, through THE loop: losses on held-out text, executed FLOPs, time of a step.

The text comes in two kinds, prose (docstrings) and code, split by module, both in tokens of a tokenizer that was
trained on the prose. A model is trained on prose; then it is updated with a stream of prose like that, as one replays
it against forgetting, of code, which is new, and of garbage, where nobody has cleaned the stream: prose in no order, as
pages made of keywords are, and tokens drawn evenly, as what was decoded wrongly. Each place of the stream holds one of
these by a draw from the seed. Knows no claim.
"""

import json
import multiprocessing
import platform
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from modelwright.core.config import parse
from modelwright.core.progress import SilentProgress
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.data.builtin import machine_corpus
from modelwright.data.loader import PackedLoader, PackedRows
from modelwright.data.pack import PackConfig, pack
from modelwright.data.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright.optim.sparse import SparseConfig
from modelwright.parallel.mesh import single
from modelwright.train.build import train
from modelwright.train.objective import forward
from modelwright.train.technique import StepInfo, Technique
from modelwright_claims.claim import Setting
from modelwright_claims.kept import Kept
from modelwright_claims.workbench import VOCAB_SIZE, Clock, Size

TextKind = Literal["prose", "code"]
KINDS: tuple[TextKind, ...] = ("prose", "code")
PROSE, CODE, SHUFFLED, RANDOM = range(4)
"""What a place of the stream holds."""
HELDOUT_ROWS = 400


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, as plain data for another process.

    share_of_code, share_of_garbage: of the rows; begin and keep: names of weights to start from and to leave, "" for
    none; sparse: as in a configuration file.
    """

    name: str
    regime: str
    size: Size
    seed: int
    share_of_code: float
    share_of_garbage: float = 0.0
    sparse: Mapping[str, Any] = field(default_factory=dict)
    begin: str = ""
    keep: str = ""
    tuning: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run gave. losses: held out, nats a token, by kind of text; flops: executed, of the whole run; step_s: the
    median, on a machine that may have done other things beside it."""

    losses: Mapping[str, float]
    flops: float
    step_s: float


@dataclass
class Stream:
    """A `BatchSource` of prose, code and garbage; the row at a place of the stream depends on seed and place alone."""

    sources: Mapping[TextKind, PackedLoader]
    batch_rows: int
    kinds: np.ndarray
    """For each place of the stream."""
    seed: int
    vocab_size: int

    @property
    def num_batches_per_epoch(self) -> int:
        return len(self.kinds) // self.batch_rows

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        share = self.batch_rows // world_size
        first = index * self.batch_rows + rank * share
        before = np.bincount(self.kinds[:first], minlength=4)
        numbers: dict[TextKind, int] = {"code": int(before[CODE]), "prose": int(before[PROSE] + before[SHUFFLED])}
        rows: list[TokenBatch] = []
        for place in range(first, first + share):
            kind = self.kinds[place]
            if kind == RANDOM:
                rows.append(self.random_row(place))
                continue
            source: TextKind = "code" if kind == CODE else "prose"
            loader, number = self.sources[source], numbers[source]
            row = loader.rows.gather(loader.order(number, number + 1))
            rows.append(self.in_no_order(row, place) if kind == SHUFFLED else row)
            numbers[source] += 1
        return _joined(rows)

    def random_row(self, place: int) -> TokenBatch:
        """Tokens drawn evenly from the vocabulary."""
        shape = (1, self.sources["prose"].rows.seq_len)
        return _one_document(torch.randint(self.vocab_size, shape, generator=self.draw(place)))

    def in_no_order(self, row: TokenBatch, place: int) -> TokenBatch:
        """The row's tokens as they come out of a drum."""
        ids_1T = row.input_ids_BT
        return _one_document(ids_1T[:, torch.randperm(ids_1T.shape[1], generator=self.draw(place))])

    def draw(self, place: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, "garbage", place))


def _one_document(ids_1T: Tensor) -> TokenBatch:
    labels_1T = torch.full_like(ids_1T, IGNORED)
    labels_1T[:, :-1] = ids_1T[:, 1:]
    return TokenBatch(
        input_ids_BT=ids_1T,
        labels_BT=labels_1T,
        positions_BT=torch.arange(ids_1T.shape[1])[None],
        segments_BT=torch.zeros(ids_1T.shape, dtype=torch.int32),
    )


def _joined(rows: Sequence[TokenBatch]) -> TokenBatch:
    return TokenBatch(
        input_ids_BT=torch.cat([row.input_ids_BT for row in rows]),
        labels_BT=torch.cat([row.labels_BT for row in rows]),
        positions_BT=torch.cat([row.positions_BT for row in rows]),
        segments_BT=torch.cat([row.segments_BT for row in rows]),
    )


def prepare(folder: Path, *, seq_len: int, fraction: float) -> None:
    """Write both kinds of text as packed rows, unless they are there; fraction: of the modules."""
    if (folder / "vocabulary.json").exists():
        return
    texts: dict[tuple[str, str], list[str]] = {}
    for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None):
        texts.setdefault((document.kind, document.split), []).append(document.text)
    tokenizer = train_tokenizer(texts["prose", "train"], TokenizerConfig(vocab_size=VOCAB_SIZE))
    for kind in KINDS:
        for split in ("train", "heldout"):
            sequences = ((ids, None) for ids in tokenizer.encode_documents(texts[kind, split]))
            config = PackConfig(seq_len=seq_len)
            pack(sequences, folder / kind / split, config, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    (folder / "vocabulary.json").write_text(json.dumps(tokenizer.vocab_size), encoding="utf-8")


def stream(folder: Path, run: Run) -> Stream:
    """The rows of a run, in its seed's order."""
    num_places = run.size.num_steps * run.size.batch_rows
    draw = np.random.Philox(derive_seed(run.seed, "kinds", run.regime)).random_raw(num_places) * 2.0**-64
    code, garbage = run.share_of_code, run.share_of_garbage
    kinds = np.full(num_places, PROSE)
    kinds[draw < code] = CODE
    kinds[draw >= 1.0 - garbage] = SHUFFLED
    kinds[draw >= 1.0 - garbage / 2] = RANDOM
    sources: dict[TextKind, PackedLoader] = {
        kind: PackedLoader(
            PackedRows(folder / kind / "train"), batch_rows=1, seed=derive_seed(run.seed, "order", run.regime)
        )
        for kind in KINDS
    }
    return Stream(sources, run.size.batch_rows, kinds, run.seed, vocab_size_of(folder))


def vocab_size_of(folder: Path) -> int:
    return json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))


@dataclass
class Work(Clock):
    """Keeps every step's time and executed FLOPs."""

    flops: float = 0.0

    def observe(self, info: StepInfo) -> None:
        super().observe(info)
        self.flops += info.scalars["executed_flops"]


def execute(folder: Path, run: Run, kept: Path) -> Found:
    """Train once and look at the held-out text. folder: of the text; kept: of the weights."""
    size = run.size
    model = Decoder(replace(size.model_config(vocab_size_of(folder)), tie_embeddings=False))
    model.init_weights(derive_seed(run.seed, "weights"))
    if run.begin:
        load_model(model, kept / run.begin)
    work = Work()
    config = size.train_config(sparse=parse(SparseConfig, dict(run.sparse)))
    with tempfile.TemporaryDirectory(dir=folder) as stage:
        train(
            model,
            Pretrain(stream(folder, run)),
            config,
            num_steps=size.num_steps,
            world=single(),
            stage=StageDir(Path(stage)),
            seed=run.seed,
            name=run.name,
            input_digest="claim",
            progress=SilentProgress(),
            techniques=[Technique(name="work", on_step_end=work.observe)],
        )
    if run.keep:
        save_model(model, str(kept / run.keep))
    losses = {kind: heldout_loss(model, PackedRows(folder / kind / "heldout")) for kind in KINDS}
    return Found(losses=losses, flops=work.flops, step_s=work.step_s)


@torch.no_grad()
def heldout_loss(model: Decoder, rows: PackedRows) -> float:
    """Nats a token, over evenly chosen rows."""
    every = max(1, rows.num_rows // HELDOUT_ROWS)
    total, count = 0.0, 0
    for numbers in np.array_split(np.arange(0, rows.num_rows, every), 8):
        batch = rows.gather(numbers)
        total += float(model.cross_entropy(forward(model, batch), batch.labels_BT, chunk_tokens=512))
        count += batch.num_targets
    return total / count


def execute_all(
    folder: Path, runs: Sequence[Run], setting: Setting, *, kept: Path, processes: int, timed: bool = False
) -> list[Found]:
    """The runs, each by a process of one thread, `processes` at a time.

    kept: folder of what was found and of weights; what is there is not made again, unless it is `timed`.
    """
    kept.mkdir(parents=True, exist_ok=True)
    done = Kept(None if timed else kept / "found.json")
    missing = [run for run in runs if _key(run) not in done or (run.keep and not (kept / run.keep).exists())]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        pending = [(run, pool.submit(execute, folder, run, kept)) for run in missing]
        for run, future in pending:
            found = future.result()
            setting.progress.note(f"{run.regime}, {run.name}, seed {run.seed}, {run.size.learning_rate:g}: {found}")
            done[_key(run)] = asdict(found)
    return [Found(**done[_key(run)]) for run in runs]


def _key(run: Run) -> str:
    return f"{json.dumps(asdict(run), sort_keys=True)}, text of Python {platform.python_version()}"
