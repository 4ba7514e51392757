"""Claim: replay keeps old tasks through three successive updates within 1% of training from scratch on everything, at
half of its compute at most.

A model learns the documentation of the standard library; then three updates bring that of NumPy, that of PyTorch, and
code, each by the product's own update (`continual.update`) with a share of rows that it replays without help from all
runs before: the update after the first has texts of two bodies to draw from, the next of three. Next to them is one
model of the same size that learned all four bodies from random weights with the compute of the first model and its
updates together: the capacity floor. Losses are bits per byte of held-out modules; the share of replay is chosen on
one half of these documents and reported on the other.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, is_finished, write_atomic
from modelwright.core.config import derive_seed
from modelwright.core.progress import SilentProgress
from modelwright.data.document import Document
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import EvaluateConfig, record_costs
from modelwright.model.hf import load_model
from modelwright.pipeline.models import find_model
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment
from modelwright_claims.product_runs import SeedJob, by_seed, facts_of, make, make_run
from modelwright_claims.statistics import Estimate, estimate, percent_above, ratios
from modelwright_continual.benchmark import HALVES, TASKS, Benchmark, Half, Task, freeze_benchmark, load_benchmark
from modelwright_continual.update import UpdateRequest, run_update

OLD = "old"
UPDATES = ("numpy", "torch", "code")
"""In the order in which they come."""
SOURCES = {"python:stdlib": OLD, "python:topics": OLD, "python:numpy": "numpy", "python:torch": "torch"}
"""The body that prose of each source belongs to."""
HELDOUT_FRACTION = 1 / 8
"""Share of the modules that nothing is trained on."""
FEWEST_CHARS, MOST_CHARS = 100, 4_000
PIECE_CHARS = 1_000
"""Length of a piece of code, so that it is about as long as a docstring."""


@dataclass(frozen=True)
class UpdateTexts:
    """A JSON-lines file for each body and, with `-heldout`, for its held-out part."""

    folder: Path

    def train(self, body: str) -> str:
        return str((self.folder / f"{body}.jsonl").resolve())

    def heldout(self, body: str) -> str:
        return str((self.folder / f"{body}-heldout.jsonl").resolve())


def write_texts(folder: Path, *, fraction: float, most_old: int, most_new: int, most_heldout: int) -> UpdateTexts:
    """Write the files, unless they exist. fraction: of the modules; most: documents of a body, drawn by hash."""
    texts = UpdateTexts(folder)
    if (folder / "done").exists():
        return texts
    folder.mkdir(parents=True, exist_ok=True)
    by_file: dict[str, dict[str, Document]] = {}
    heldout: set[str] = set()
    documents = sorted(_documents(fraction), key=lambda one: not _is_heldout(one[1]))
    for body, document in documents:  # of two equal texts the held-out one stays
        if _is_heldout(document):
            heldout.add(_content(document))
            by_file.setdefault(f"{body}-heldout", {}).setdefault(_content(document), document)
        elif _content(document) not in heldout:
            by_file.setdefault(body, {}).setdefault(_content(document), document)
    limits = {OLD: most_old} | dict.fromkeys(UPDATES, most_new)
    for body, most in limits.items():
        for name, limit in ((body, most), (f"{body}-heldout", most_heldout)):
            drawn = _drawn(list(by_file.get(name, {}).values()), limit)
            write_atomic(folder / f"{name}.jsonl", "".join(f"{one.to_json()}\n" for one in drawn))
    write_atomic(folder / "done", json.dumps(limits))
    return texts


def _documents(fraction: float) -> Iterator[tuple[str, Document]]:
    """Documents with their body; code in pieces."""
    for document in machine_corpus(fraction=fraction, skip=lambda reason, file: None):
        if document.kind == "prose" and document.source in SOURCES:
            if FEWEST_CHARS <= len(document.text) <= MOST_CHARS:
                yield SOURCES[document.source], document
        elif document.kind == "code":
            for number, piece in enumerate(_pieces(document.text)):
                yield "code", replace(document, id=f"{document.id}:{number}", text=piece)


def _pieces(code: str) -> Iterator[str]:
    """Whole lines, at most `PIECE_CHARS` characters together where lines are shorter."""
    piece: list[str] = []
    size = 0
    for line in code.splitlines(keepends=True):
        if size + len(line) > PIECE_CHARS and size >= FEWEST_CHARS:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if FEWEST_CHARS <= size <= MOST_CHARS:
        yield "".join(piece)


def _content(document: Document) -> str:
    """The text without its title, by which documents are compared."""
    return document.text.partition("\n\n")[2] if document.kind == "prose" else document.text


def _is_heldout(document: Document) -> bool:
    return derive_seed(0, "updates", "heldout", document.meta["module"]) < HELDOUT_FRACTION * 2**63


def _drawn(documents: Sequence[Document], limit: int) -> list[Document]:
    chosen = sorted(documents, key=lambda document: derive_seed(0, "updates", document.id))[:limit]
    return [replace(document, split="open", meta={}) for document in chosen]


MOST_ABOVE = 1.0
"""Percent of the loss of training from scratch on everything."""
MOST_COMPUTE = 0.5
"""The largest share of the compute of training from scratch on everything."""
SCRATCH, FIRST = "from scratch on everything", "first model"
GROUPS: tuple[tuple[Half, Task], ...] = tuple((half, task) for half in HALVES for task in TASKS)
"""Held-out documents that are measured by themselves."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of a measurement."""

    seeds: tuple[int, ...]
    fraction: float
    most_old: int
    most_new: int
    most_heldout: int
    num_steps: int
    """Updates of the first model."""
    model: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The way in which updates are made."""

    replay: float
    average: bool = False

    @property
    def name(self) -> str:
        return f"replay {self.replay:.0%}" + (", averaged" if self.average else "")


ARMS = (
    Arm(replay=0.0), Arm(replay=0.01), Arm(replay=0.05), Arm(replay=0.25), Arm(replay=0.05, average=True),
)  # fmt: skip
"""The last one is what an update does unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True)
class ChainJob(SeedJob):
    """The work of one process. name: of the arm, `FIRST` or `SCRATCH`."""

    scale: Scale
    name: str
    num_steps: int = 0
    """Steps of the model that is trained from scratch."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """flops, num_steps: of all its trainings; bits: bits per byte at the end by `half/task`; after: of old texts on the
    test half after each update.
    """

    flops: float
    num_steps: int
    bits: Mapping[str, float]
    after: Sequence[float]


def scale_of(setting: Setting) -> Scale:
    model = {"num_layers": 1, "model_dim": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 128}
    if setting.quick:
        return Scale(
            seeds=(0,), fraction=0.15, most_old=200, most_new=60, most_heldout=50, num_steps=20,
            model={"vocab_size": 512, **model},
        )  # fmt: skip
    model = {"num_layers": 2, "model_dim": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 352}
    return Scale(
        seeds=(0, 1, 2, 3, 4), fraction=1.0, most_old=3000, most_new=400, most_heldout=160, num_steps=400,
        model={"vocab_size": 1024, **model},
    )  # fmt: skip


def measure(setting: Setting) -> Measurement:
    scale, folder = scale_of(setting), setting.folder / "forgetting"
    write_texts(
        folder / "texts",
        fraction=scale.fraction,
        most_old=scale.most_old,
        most_new=scale.most_new,
        most_heldout=scale.most_heldout,
    )
    _benchmark(folder)
    arms = ARMS[:1] + ARMS[-2:] if setting.quick else ARMS
    one = ChainJob(folder=folder, seed=0, quick=setting.quick, scale=scale, name=FIRST)
    first = _make(setting, [replace(one, seed=seed) for seed in scale.seeds])
    names = [arm.name for arm in arms]
    jobs = [replace(one, seed=seed, name=name) for seed in scale.seeds for name in names]
    made = dict(zip(((job.seed, job.name) for job in jobs), _make(setting, jobs), strict=True))
    # The model from scratch has at least the compute of a first model and its updates.
    whole = [
        replace(one, seed=seed, name=SCRATCH, num_steps=max(made[seed, name].num_steps for name in names))
        for seed in scale.seeds
    ]
    chains: dict[str, list[Chain]] = {FIRST: first, SCRATCH: _make(setting, whole)}
    chains |= {name: [made[seed, name] for seed in scale.seeds] for name in names}
    samples: dict[str, list[float]] = {}
    kinds = {"old": "test/old", "new": "test/new", "old, validation": "validation/old"}
    for name, of in chains.items():
        samples |= {f"{kind}: {name}": [chain.bits[key] for chain in of] for kind, key in kinds.items()}
        samples[f"FLOPs: {name}"] = [chain.flops for chain in of]
        for number in range(1, 1 + min(len(chain.after) for chain in of)):
            samples[f"old after update {number}: {name}"] = [chain.after[number - 1] for chain in of]
    return Measurement(
        samples=samples,
        conditions={
            "seeds": len(scale.seeds),
            "updates": len(UPDATES),
            "steps of the first model": scale.num_steps,
            "model": f"{scale.model['num_layers']} layers of width {scale.model['model_dim']}",
            "rate": "4e-3 from scratch and 2e-3 in updates, warmup and decay each time, as in the recipe "
            "continual-demo",
            "texts": "documentation of the standard library, then of NumPy, of PyTorch, then the standard "
            "library's code",
            "from scratch": "all texts together, as many steps as the first model and its updates with the most of "
            "them",
            "replayed": "by the product itself: drawn from all bodies before, each by its size",
            "compute of the updates": "FLOPs of the three updates, without those of the first model, which exists",
        },
    )


def _make(setting: Setting, jobs: Sequence[ChainJob]) -> list[Chain]:
    """Return the results of the jobs; results of an earlier call are kept. Updates need their first model in the
    folder.
    """

    def make_first(missing: Sequence[ChainJob]) -> None:
        updates = {job.seed: replace(job, name=FIRST) for job in missing if job.name not in (FIRST, SCRATCH)}
        make(setting, run_chain, list(updates.values()))

    here = sys.modules[__name__]
    return [Chain(**chain) for chain in by_seed(setting, run_chain, jobs, here, name="forgetting", before=make_first)]


def run_chain(job: ChainJob) -> Chain:
    """Make the first model, the model from scratch, or three updates in a row; a process's whole work."""
    texts, benchmark = UpdateTexts(job.folder / "texts"), _benchmark(job.folder)
    place = job.folder / f"seed-{job.seed}"
    if job.name == FIRST:
        run = _from_scratch(job, [texts.train(OLD)], job.scale.num_steps, place / "first", benchmark)
        return _chain([run], _bits(run, benchmark))
    if job.name == SCRATCH:
        sources = [texts.train(body) for body in (OLD, *UPDATES)]
        run = _from_scratch(job, sources, job.num_steps, place / "scratch", benchmark)
        return _chain([run], _bits(run, benchmark))
    arm = next(arm for arm in ARMS if arm.name == job.name)
    runs, after = [RunDir(place / "first")], list[float]()
    for body in UPDATES:
        run = RunDir(place / arm.name.replace(" ", "-") / body)
        request = UpdateRequest(
            model=runs[-1].path,
            new=(texts.train(body),),
            replay=arm.replay,
            average=arm.average,
            settings=_update_settings(job, arm),
        )
        run_update(request, benchmark, run, words=["continual", str(runs[-1].path)], progress=SilentProgress())
        runs.append(run)
        after.append(_bits(run, benchmark, groups=[("test", OLD)])["test/old"])
    return _chain(runs, _bits(runs[-1], benchmark), after)


def _from_scratch(job: ChainJob, sources: Sequence[str], num_steps: int, folder: Path, benchmark: Benchmark) -> RunDir:
    """A model that learns these texts from random weights."""
    halves = [str(benchmark.file(task, half).resolve()) for task in TASKS for half in ("validation", "test")]
    settings: dict[str, Any] = {
        "name": folder.name,
        "seed": job.seed,
        "hardware": {"device": "cpu", "num_threads": 1},
        "stages": ["clean", "tokenize", "pack", "pretrain"],
        "data": {"sources": list(sources)},
        "clean": {"num_workers": 1, "decontamination": {"sources": halves}},
        "tokenizer": {"vocab_size": job.scale.model["vocab_size"]},
        "model": dict(job.scale.model),
        "pretrain": {"num_steps": num_steps, "eval_every_steps": 0},
    }
    return make_run("continual-demo", settings, folder)


def _update_settings(job: ChainJob, arm: Arm) -> Mapping[str, Any]:
    return {
        "seed": job.seed,
        "hardware": {"device": "cpu", "num_threads": 1},
        "stages": ["clean", "pack", "pretrain", *(["average"] if arm.average else [])],
        "clean": {"num_workers": 1},
        "pack": {"seq_len": 256},
        "training": {"precision": {"policy": "fp32"}},
        "pretrain": {"num_epochs": 1.0, "learning_rate": 2e-3, "batch_tokens": 2048, "eval_every_steps": 0},
    }


def _benchmark(folder: Path) -> Benchmark:
    """Held-out documents of the old body and of all later ones."""
    place, texts = folder / "bench", UpdateTexts(folder / "texts")
    if is_finished(place):
        return load_benchmark(place)
    return freeze_benchmark([texts.heldout(OLD)], [texts.heldout(body) for body in UPDATES], place)


def _bits(run: RunDir, benchmark: Benchmark, groups: Sequence[tuple[Half, Task]] = GROUPS) -> dict[str, float]:
    """Bits per byte of the run's last model, by `half/task`."""
    folder = find_model(run.path).source.folder
    model, tokenizer = load_model(folder).eval(), Tokenizer.load(folder)
    bits: dict[str, float] = {}
    for half, task in groups:
        documents = benchmark.read(task, half)
        costs = record_costs(model, tokenizer, documents, EvaluateConfig(), progress=SilentProgress())
        rows = [row for of_form in costs.values() for row in of_form]
        bits[f"{half}/{task}"] = sum(row["nats"] for row in rows) / math.log(2) / sum(r["num_bytes"] for r in rows)
    return bits


def _chain(runs: Sequence[RunDir], bits: Mapping[str, float], after: Sequence[float] = ()) -> Chain:
    facts = [facts_of(run, "pretrain") for run in runs]
    return Chain(
        flops=sum(float(one["model_flops"]) for one in facts),
        num_steps=sum(int(one["num_steps"]) for one in facts),
        bits=bits,
        after=after,
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()

    def above(kind: str, name: str, other: str) -> Estimate:
        return percent_above(samples[f"{kind}: {name}"], samples[f"{kind}: {other}"])

    def compute(name: str) -> Estimate:
        """FLOPs of the updates alone, to those of the model from scratch."""
        pairs = zip(samples[f"FLOPs: {name}"], samples[f"FLOPs: {FIRST}"], strict=True)
        return ratios([whole - first for whole, first in pairs], samples[f"FLOPs: {SCRATCH}"])

    names = [name for arm in ARMS if f"old: {(name := arm.name)}" in samples]
    for name in names:
        with judgment.part():
            for kind in ("old", "new"):
                judgment.ask(f"{kind} loss above that from scratch, {name}", above(kind, name, SCRATCH), "%")
            judgment.ask(f"old loss above the first model's, {name}", above("old", name, FIRST), "%")
            judgment.ask(f"compute of the updates to that from scratch, {name}", compute(name), "x")
            for number in range(1, len(UPDATES) + 1):
                after = estimate(samples[f"old after update {number}: {name}"])
                judgment.ask(f"old bits per byte after update {number}, {name}", after, "bits")
    chosen = min(names, key=lambda name: statistics.fmean(samples[f"old, validation: {name}"]))
    with judgment.part():
        loss = above("old", chosen, SCRATCH)
        judgment.ask("", loss, "%", "<=", MOST_ABOVE, what=f"old loss above that from scratch, {chosen}")
        cost = compute(chosen)
        judgment.ask("", cost, "x", "<=", MOST_COMPUTE, what="compute of the updates")
        judgment.said.append(
            f"{chosen} (chosen on the validation half): old texts {loss.mean:+.2f}% beside training from scratch on "
            f"everything, with {cost.mean:.2f} of its compute"
        )
    with judgment.part():
        since = ", ".join(f"{name} {above('old', name, FIRST).mean:+.1f}%" for name in (*names, SCRATCH))
        judgment.said.append(f"old texts since the first model: {since}")
    judgment.said.append(f"{conditions['seeds']} seeds")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    statement="Replay keeps old tasks through three successive updates within 1% of training from scratch on "
    "everything, at half of its compute at most.",
    source="Ibrahim et al., Simple and Scalable Strategies to Continually Pre-train Large Language Models, 2024 "
    "(arXiv:2403.08763)",
    published="5% replay suffices under a weak shift, 25% under a strong one, to match retraining on everything at "
    "less than half of its compute",
    compared="three updates in a row with 0, 1, 5 and 25% of replayed rows, and with 5% and averaged weights, against "
    "a model of the same size from random weights on all texts with the compute of all trainings; paired seeds",
    target=f"bits per byte of old held-out texts at most {MOST_ABOVE:g}% above training from scratch, with the arm "
    f"that is chosen on other documents, and at most {MOST_COMPUTE:g} of the compute",
    headline=tuple(f"old loss above that from scratch, {arm.name}" for arm in ARMS),
)
