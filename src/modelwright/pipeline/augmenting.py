"""Changed copies of documents: for a file of them (`modelwright augment`), and in the batches of a training stage
whose run has the section `augmentation`.

`modelwright augment` divides documents into shards, then workers make the copies of each shard. The same command
resumes an interrupted one: a finished shard is not made again. The result does not depend on the number of workers.
Span infilling uses a model folder: our engine generates, the evaluation's scoring compares.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import LOCK_FILE, lock_folder, writing
from modelwright.core.config import ConfigError, ModelError, derive_seed, digest, dump, parse
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.resources import num_usable_cores
from modelwright.core.texts import redact_text
from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.augment.augmenter import AugmentConfig, Augmenter, CopyRecipe, MethodCost
from modelwright.data.augment.methods import build_methods, known_methods
from modelwright.data.clean.config import CleanConfig
from modelwright.data.clean.steps.step import ShardFiles, numbered, pack_lines, unpack_lines
from modelwright.data.document import Document
from modelwright.data.rows.ahead import AugmentedLoader, PlannedRows
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.data.workers import LocalProcesses
from modelwright.evaluate.scoring import Scored, sequence_nats
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.hf import load_model
from modelwright.pipeline.cleaning import fingerprint
from modelwright.pipeline.stage import AugmentationConfig, RunConfig, StageSpec
from modelwright.pipeline.stages.pack import PACK
from modelwright.train.job import TrainResult
from modelwright.train.technique import TechniqueBuilder
from modelwright.train.techniques.augmentation_strength import augmentation_strength

_SHARD_DOCUMENTS = 500
_BATCH_DOCUMENTS = 16
_ORIGINALS, _COPIES = "originals", "copies"
_PREVIEW_TRIES = 50
"""Documents that a preview reads at most for each pair that it shows."""


@dataclass(frozen=True)
class ShardJob:
    """A shard for a worker. settings: settings of the methods, by name, as plain data."""

    shard: ShardFiles
    augment: AugmentConfig
    settings: Mapping[str, Any]


def make_methods(names: Sequence[str], settings: Mapping[str, Any]) -> list[Augmentation]:
    """Builds the methods that are named. settings: settings by name, as plain data. Raises `ConfigError`."""
    configs = {
        method.name: parse(method.config, settings[method.name], method.name)
        for method in known_methods()
        if method.name in settings
    }
    return build_methods(names, configs, InfillModel)


def preview(
    data: SourceConfig, augment: AugmentConfig, settings: Mapping[str, Any], num_pairs: int
) -> list[tuple[Document, Document]]:
    """Returns the first documents that change, each with its changed copy."""
    augmenter = Augmenter(make_methods(augment.methods, settings), seed=augment.seed)
    pairs: list[tuple[Document, Document]] = []
    documents = read_documents(data, report=SourceReport())
    for document in islice(documents, num_pairs * _PREVIEW_TRIES):
        (copy,) = augmenter([document], epoch=0, strength=augment.strength)
        if copy is not None:
            pairs.append((document, copy))
        if len(pairs) == num_pairs:
            break
    return pairs


def augment_sources(
    data: SourceConfig, augment: AugmentConfig, settings: Mapping[str, Any], out: Path, progress: Progress
) -> list[str]:
    """Writes the copies as JSON lines into `out`, in the order of the documents; returns the lines to print.

    settings: settings of the methods, by name, as plain data. Documents that `data` holds out get no copy. Raises
    `ConfigError` and `DataError`.
    """
    make_methods(augment.methods, settings)  # fails before anything is read
    work = out.with_name(f"{out.name}.work")
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
    # This command leaves a lock file in its folder; without one, the files are someone else's and may not be removed.
    if not (work / LOCK_FILE).exists() and any(work.iterdir()):
        raise ConfigError(f"{work}: unfinished copies would go here, and it has other files; choose another output")
    with lock_folder(work, "this folder; wait for it or write elsewhere"):
        # A folder per request, so that another one never uses its shards. The number of workers changes no copy.
        work_key = digest(
            [dump(data), fingerprint(data, CleanConfig()), dump(replace(augment, num_workers=0)), settings]
        )
        report = SourceReport()
        folder, num_shards = work / work_key, 0
        with writing(folder):
            folder.mkdir(exist_ok=True)
            documents = read_documents(data, report=report)
            while chunk := list(islice(documents, _SHARD_DOCUMENTS)):
                shard = ShardFiles(folder, num_shards)
                if shard.facts(_ORIGINALS) is None:  # a finished shard is not written again
                    content = pack_lines(document.to_json() for document in chunk)
                    shard.write(_ORIGINALS, {"originals.zst": content}, {})
                num_shards += 1
        shards = list(numbered(folder, num_shards))
        jobs = [ShardJob(shard, augment, settings) for shard in shards]
        engine = LocalProcesses(augment.num_workers or num_usable_cores())
        progress.begin("augment", report.num_documents, "documents")
        num_done = 0
        for num_documents in engine.map(augment_shard, jobs):
            num_done += num_documents
            progress.advance(num_done)
        progress.end()
        facts = [shard.facts(_COPIES) or {} for shard in shards]
        temporary = out.with_name(f"{out.name}.tmp")
        with writing(out):
            with open(temporary, "w", encoding="utf-8") as file:
                for shard in shards:
                    file.writelines(f"{line}\n" for line in unpack_lines(shard.read(_COPIES, "copies.zst")))
                file.flush()
                os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file of that name
            os.replace(temporary, out)
    shutil.rmtree(work)
    return [*(redact_text(line) for line in report.summary()), *_summary(facts), f"copies in {out}"]


def augment_shard(job: ShardJob) -> int:
    """Makes the copies of a shard, unless they exist; returns the number of its documents."""
    facts = job.shard.facts(_COPIES)
    if facts is None:
        methods = make_methods(job.augment.methods, job.settings)
        augmenter = Augmenter(methods, seed=job.augment.seed)
        documents = list(map(Document.from_json, unpack_lines(job.shard.read(_ORIGINALS, "originals.zst"))))
        lines: list[str] = []
        for start in range(0, len(documents), _BATCH_DOCUMENTS):
            batch = documents[start : start + _BATCH_DOCUMENTS]
            rounds = [
                augmenter(batch, epoch=epoch, strength=job.augment.strength) for epoch in range(job.augment.copies)
            ]
            # The copies of a document follow each other, whichever round made them.
            lines += [copy.to_json() for place in zip(*rounds, strict=True) for copy in place if copy is not None]
        facts = {
            "documents": len(documents),
            "held_out": sum(document.split != "train" for document in documents),
            "copies": len(lines),
            "costs": {name: asdict(cost) for name, cost in augmenter.costs.items()},
            "unchanged": dict(sum((Counter(method.counts()) for method in methods), Counter())),
        }
        job.shard.write(_COPIES, {"copies.zst": pack_lines(lines)}, facts)
    return facts["documents"]


def _summary(facts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each method with its documents, its changes and its cost, and remarks on the whole."""
    totals: dict[str, MethodCost] = {}
    for shard in facts:
        for name, cost in shard["costs"].items():
            totals.setdefault(name, MethodCost()).add(MethodCost(**cost))
    yield f"{'method':<22}{'documents':>12}{'changed':>12}{'seconds':>12}{'documents/s':>14}"
    for name, cost in totals.items():
        yield (
            f"{name:<22}{cost.num_documents:>12,}{cost.num_changed:>12,}{cost.seconds:>12,.1f}{cost.documents_per_s:>14,.1f}"
        )
    if idle := [name for name, cost in totals.items() if cost.num_documents and not cost.num_changed]:
        yield (
            f"changed nothing: {', '.join(idle)}. They need spaces between words, upper and lower case, or English "
            "words, which Chinese text, for example, does not have; choose other methods for these documents"
        )
    unchanged = sum((Counter(shard["unchanged"]) for shard in facts), Counter[str]())
    if unchanged:
        yield "left as they were: " + ", ".join(f"{count:,} {reason}" for reason, count in sorted(unchanged.items()))
    if held_out := sum(shard["held_out"] for shard in facts):
        yield f"held out, and so not augmented: {held_out:,} documents"
    num_copies, num_documents = (sum(shard[name] for shard in facts) for name in ("copies", "documents"))
    yield f"{num_copies:,} copies of {num_documents:,} documents"


@dataclass(frozen=True)
class MethodBuilder:
    """Builds the methods in a worker. settings: settings of the methods, as JSON."""

    names: tuple[str, ...]
    settings: str

    def __call__(self) -> list[Augmentation]:
        return make_methods(self.names, json.loads(self.settings))


def augmented(
    loader: PlannedRows, config: RunConfig, spec: StageSpec, tokenizer: Path, progress: Progress
) -> tuple[PlannedRows | AugmentedLoader, Sequence[TechniqueBuilder]]:
    """Returns the loader with augmentation, and the technique that sets its strength; the loader itself if nothing is
    augmented. Raises `ConfigError` if a method cannot be built.
    """
    settings = config.augmentation
    if not is_augmented(config, spec):
        if settings.is_on and spec.rows is not None:
            progress.note(f"{spec.name}: the section augmentation does not act on rows of {spec.rows.title}")
        return loader, []
    assert spec.rows is not None
    assert spec.rows.encoder is not None
    methods = MethodBuilder(settings.methods, json.dumps(settings.settings, sort_keys=True))
    methods()  # fails before the training starts
    rows = loader.rows
    recipe = CopyRecipe(
        folder=rows.folder,
        seq_len=rows.seq_len,
        eos_id=rows.eos_id,
        seed=derive_seed(config.seed, spec.name, "augmentation"),
        encoder=spec.rows.encoder(config.section(PACK), tokenizer),
        methods=methods,
    )
    changed = AugmentedLoader(loader, recipe, num_workers=settings.num_workers)
    return changed, [partial(augmentation_strength, settings.strength, changed)]


def is_augmented(config: RunConfig, spec: StageSpec) -> bool:
    """Returns True if documents of the stage's rows change while it trains."""
    return config.augmentation.is_on and spec.rows is not None and spec.rows.encoder is not None


def augmentation_digest(config: AugmentationConfig) -> str:
    """Returns a digest of the settings that determine the copies."""
    return digest([config.methods, config.settings, config.strength])


def tell_cost(name: str, result: TrainResult, progress: Progress) -> None:
    """Notes the number of changed documents and the cost of augmentation in a line."""
    summary = result.summary_of("augmentation_strength")
    if not summary:
        return
    methods = summary["methods"]
    changed = sum(cost["num_changed"] for cost in methods.values())
    by_method = ", ".join(
        f"{method} {cost['num_changed']:,}" for method, cost in methods.items() if cost["num_changed"]
    )
    progress.note(
        f"{name}: {changed:,} copies of documents ({by_method}) made in {summary['cpu_s']:,.1f} CPU seconds; steps "
        f"waited {summary['wait_s']:,.1f} s for them"
    )


_TEMPERATURE, _TOP_P = 0.8, 0.95
"""Sampling of text that fills gaps: nucleus sampling (Holtzman et al. 2020), at a temperature below 1."""
_SCORE_TOKENS = 2_048


class InfillModel:
    """The model and tokenizer in a folder. Raises `ModelError` if they cannot be read or do not match."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder).eval()
        self._tokenizer = Tokenizer.load(folder)
        if self._tokenizer.vocab_size > self._model.config.vocab_size:
            raise ModelError(f"{folder}: the tokenizer has more tokens than the model; they do not match")
        begin = self._tokenizer.bos_id
        self._start = self._tokenizer.eos_id if begin is None else begin

    def complete(self, prompts: Sequence[str], *, max_tokens: int, seeds: Sequence[int]) -> list[str]:
        """Returns a sampled continuation of each prompt; a long prompt is cut to its end."""
        most = self._model.config.max_seq_len - max_tokens - 1
        ids = [[self._start, *self._tokenizer.encode(prompt)[-most:]] for prompt in prompts]
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=_TEMPERATURE,
                top_p=_TOP_P,
                seed=seed,
                stop_ids=self._tokenizer.stop_ids,
            )
            for seed in seeds
        ]
        # padded products: what is computed together cannot change a completion
        config = EngineConfig(
            batch_invariant=True, kv_cache_tokens=max(EngineConfig.kv_cache_tokens, self._model.config.max_seq_len)
        )
        completions = generate(self._model, ids, params, config)
        return [self._tokenizer.decode(completion.token_ids) for completion in completions]

    def log_probs(self, contexts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """Returns the log-probability of each continuation, in nats."""
        log_probs: list[float] = []
        for context, continuation in zip(contexts, continuations, strict=True):
            known, scored = self._tokenizer.encode(context), self._tokenizer.encode(continuation)
            known = known[-max(1, self._model.config.max_seq_len - len(scored) - 1) :]
            sequence = Scored([self._start, *known, *scored], 1 + len(known))
            # Each sequence alone, so that rounding does not depend on the others.
            nats = sequence_nats(
                self._model,
                [sequence],
                context_overlap=0.5,
                max_context=min(self._model.config.max_seq_len, len(sequence.ids)),
                batch_tokens=_SCORE_TOKENS,
                progress=SilentProgress(),
            )
            log_probs.append(-float(nats[0]))
        return log_probs
