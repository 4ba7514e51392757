"""Judgment of an update: checks of its texts, then both models on the benchmark's test half, each in the form in which
it is served.

Old tasks must not get worse by more than a margin (non-inferiority) and new ones must get better (superiority), at the
level that remains for this use of the test half. All measures have to pass, so testing several needs no correction
(intersection-union test, Berger 1982).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
from modelwright.core.artifacts import RunDir, is_finished, read_manifest, write_artifact, write_atomic
from modelwright.core.config import ConfigError, DataError, derive_seed, digest, dump
from modelwright.core.progress import Progress
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document
from modelwright.data.sources.sources import is_own
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import EvaluateConfig, generate_numbers, record_costs, score_choices, text_costs
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.pipeline.resolve import resolved_device
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.serve.load import weights_fingerprint
from modelwright_continual.benchmark import TASKS, Benchmark, Task, level_of_use
from modelwright_continual.caps import template_groups
from modelwright_continual.gate.measures import GateMeasure, PairedComparison, Rule
from modelwright_continual.gate.order import without_order
from modelwright_continual.gate.poison import (
    PoisonCheck,
    check_garbage,
    check_heldout,
    check_influence,
    check_labels,
    check_share,
    dropped_by_quality,
)
from modelwright_continual.heldout import HeldoutTexts
from modelwright_continual.model_files import model_digest
from modelwright_continual.update import quantized_folder
from modelwright_continual.update_files import CAPPED_FILE, HELDOUT_FILE, NEW, OLD, data_folder

KIND = "gate"
FOLDER = "gate"
VERDICT = "verdict.json"
MOST_CHECKED = 2000
"""Maximum number of new texts, and of old ones, that are scored; from more, that many are drawn."""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Requirements on a candidate. margin: largest relative growth of costs on old tasks over the champion's, and
    largest fall of accuracies; alpha: probability of an error over all uses of a benchmark together; max_uses: number
    of uses after which its test half is exhausted.
    """

    margin: float = 0.02
    alpha: float = 0.05
    max_uses: int = 20
    resamples: int = 10_000
    max_new_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.margin < 1.0:
            raise ConfigError(f"--margin: must be at least 0 and below 1, got {self.margin:g}; 0.02 is 2 percent")
        if not 0.0 < self.alpha <= 0.5:
            raise ConfigError(f"--alpha: must be above 0 and at most 0.5, got {self.alpha:g}; 0.05 is usual")
        if self.max_uses < 1:
            raise ConfigError(f"--max-uses: must be at least 1, got {self.max_uses}")
        if self.resamples < 100:
            raise ConfigError(f"resamples: must be at least 100, got {self.resamples}; 10,000 are usual")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The gate's verdict on two models, which are identified by their digests; candidate_version, champion_version: the
    names by which a server knows them. use: number of this use of the test half, 0 if the texts were refused first.
    """

    passed: bool
    candidate: str
    champion: str
    benchmark: str
    candidate_version: str
    champion_version: str
    use: int
    level: float
    checks: Sequence[PoisonCheck]
    measures: Sequence[GateMeasure]

    @property
    def reasons(self) -> list[str]:
        """Reasons for the refusal of the candidate; [] if it was not refused."""
        failed = [f"{check.name}: {check.text}" for check in self.checks if not check.passed]
        return [*failed, *(measure.describe() for measure in self.measures if not measure.passed)]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"reasons": self.reasons}

    def table(self) -> str:
        """Formats the verdict for a terminal."""
        lines = [f"{check.name}: {check.text}: {'passed' if check.passed else 'REFUSED'}" for check in self.checks]
        lines += [measure.describe() for measure in self.measures]
        if self.use:
            lines.append(f"use {self.use} of the test half, each bound at level {self.level:.2g}")
        return "\n".join([*lines, "gate: passed" if self.passed else "gate: REFUSED"])

    @classmethod
    def read(cls, folder: Path) -> "Verdict":
        """Reads the verdict in a finished folder. Raises `ArtifactError` if it was changed since it was written."""
        read_manifest(folder, kind=KIND, verify=True)
        plain = json.loads((folder / VERDICT).read_text(encoding="utf-8"))
        plain.pop("reasons")
        checks = [PoisonCheck(**one) for one in plain.pop("checks")]
        measures = [GateMeasure(**one) for one in plain.pop("measures")]
        return cls(checks=checks, measures=measures, **plain)


@dataclass(frozen=True)
class JudgedModel:
    """A model in the form in which it is served. digest: of the folder's files that determine its answers; version:
    name of the model on a server that has loaded it.
    """

    model: Decoder
    tokenizer: Tokenizer
    digest: str
    version: str


def judge(run: RunDir, champion: Path, benchmark: Benchmark, config: GateConfig, progress: Progress) -> Verdict:
    """Judges the quantized model of an update against `champion`, the folder in service; reuses an existing verdict on
    the same inputs.

    The test half is used, and the use counted, only if texts and models passed the checks. Raises `ConfigError` if it
    is exhausted.
    """
    folder = run.path / FOLDER
    candidate_folder = quantized_folder(run)
    kernels = read_run_config(run.config).serve.int8  # resolved, so that a second look gives the same bits
    candidate, old_model = load_judged(candidate_folder, kernels), load_judged(champion, kernels)
    identity = digest([candidate.digest, old_model.digest, benchmark.digest, dump(vars(config))])
    if is_finished(folder) and read_manifest(folder, kind=KIND).digest == identity:
        return Verdict.read(folder)
    checks = check_texts(run, old_model, candidate, benchmark, progress)
    measures: list[GateMeasure] = []
    number, level = 0, 0.0
    if all(check.passed for check in checks):
        # Counted before the comparison, since a process that is killed later may have seen results.
        number = benchmark.count_use(candidate.digest, old_model.digest, config.max_uses).number
        level = level_of_use(number, config.alpha)
        comparison = PairedComparison(level=level, margin=config.margin, resamples=config.resamples, seed=config.seed)
        for task in TASKS:
            measures += _compare(task, benchmark, old_model, candidate, comparison, config, progress)
    verdict = Verdict(
        passed=all(check.passed for check in checks) and all(measure.passed for measure in measures),
        candidate=candidate.digest,
        champion=old_model.digest,
        benchmark=benchmark.digest,
        candidate_version=candidate.version,
        champion_version=old_model.version,
        use=number,
        level=level,
        checks=checks,
        measures=measures,
    )
    inputs = {"candidate": candidate.digest, "champion": old_model.digest, "benchmark": benchmark.digest}
    with write_artifact(folder, kind=KIND, digest=identity, inputs=inputs) as draft:
        write_atomic(draft.path / VERDICT, json.dumps(verdict.as_json(), indent=1))
    return verdict


def load_judged(folder: Path, kernels: Int8WeightsConfig) -> JudgedModel:
    """Loads the model in a folder, quantized or not, in the form that the server has in memory."""
    model: Any = load_int8(folder, kernels) if is_int8_folder(folder) else load_model(folder)
    model = model.to(resolved_device("auto")).eval()
    return JudgedModel(model, Tokenizer.load(folder), model_digest(folder), weights_fingerprint(model))


def check_texts(
    run: RunDir, champion: JudgedModel, candidate: JudgedModel, benchmark: Benchmark, progress: Progress
) -> list[PoisonCheck]:
    """Runs the checks of the cleaned texts that the run was trained on. A replay that the model generated is compared
    with held-out texts only: its predictability to the model that wrote it is meaningless.
    """
    trained = list(read_kept(run.stage(CLEAN.name).artifact, split="train"))
    bodies = {
        NEW: [one for one in trained if one.source == NEW],
        OLD: [one for one in trained if one.source == OLD and not is_own(one.meta)],
    }
    if not bodies[NEW]:
        raise DataError(
            f"{run.stage(CLEAN.name).artifact}: no new text is left after cleaning; see its report of dropped texts"
        )
    with open(data_folder(run) / HELDOUT_FILE, encoding="utf-8") as file:
        heldout = HeldoutTexts.of(Document.from_json(line) for line in file)
    trusted = {task: benchmark.read(task, "validation") for task in TASKS}
    drawn = {task: drawn_texts(bodies[task]) for task in TASKS}
    every = [document for task in TASKS for document in trusted[task]]
    flags = iter(without_order([document for part in (*drawn.values(), every) for document in part]))
    orderless = {task: list(islice(flags, len(drawn[task]))) for task in TASKS}
    usual = list(flags)  # of both tasks: more texts, and a new subject may be like neither
    checks = [check_heldout(trained, heldout)]
    for task in TASKS:
        if found := orderless[task]:
            checks += [
                check_share(f"order of {task} texts", f"{task} texts have words without an order", found, usual),
                check_labels(bodies[task], trusted[task], of=task),
            ]
    checks.append(check_garbage(_bits(champion, drawn[NEW], progress), _bits(champion, every, progress)))
    quality = read_run_config(run.config).section(CLEAN).quality
    texts = drawn_texts(_read(data_folder(run) / f"{NEW}.jsonl"))
    dropped = [dropped_by_quality(documents, quality) for documents in (texts, trusted[NEW])]
    checks.append(check_share("quality of new texts", "new texts would be dropped by the step quality", *dropped))
    return [*checks, *_check_templates(run, champion, candidate, trusted[NEW], progress)]


def _check_templates(
    run: RunDir, champion: JudgedModel, candidate: JudgedModel, trusted: Sequence[Document], progress: Progress
) -> list[PoisonCheck]:
    """Returns one check if templates were capped, else none: of the number of texts that they had, and of the update's
    influence on the texts that were left out.
    """
    facts = read_manifest(data_folder(run)).facts
    capped = facts["capped"].get("template")
    if not capped:
        return []
    left_out = drawn_texts(_read(data_folder(run) / CAPPED_FILE))
    groups = template_groups([*left_out, *trusted])
    usual = [group in set(groups[: len(left_out)]) - {""} for group in groups[len(left_out) :]]
    # Each capped template kept `limit` texts. The test needs counts only, so the order of `found` is arbitrary.
    num_alike, num_texts = capped["capped"] + capped["groups"] * capped["limit"], capped["capped"] + facts["new"]
    found = [number < num_alike for number in range(num_texts)]
    frequency = check_share(
        "templates of new texts", "new texts are of templates beyond the cap", found, usual, least_gap=0
    )
    before, after = (
        [_bits(judged, documents, progress) for documents in (left_out, trusted)] for judged in (champion, candidate)
    )
    falls = [[old - new for old, new in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    return [check_influence(frequency, *falls)]


def _read(path: Path) -> list[Document]:
    with open(path, encoding="utf-8") as file:
        return [Document.from_json(line) for line in file]


def drawn_texts(documents: Sequence[Document]) -> list[Document]:
    """Draws at most `MOST_CHECKED` documents, independent of their order, so that a source at the end is checked like
    the others.
    """
    ranked = sorted(documents, key=lambda document: derive_seed(0, "gate", document.id, document.text))
    return ranked[:MOST_CHECKED]


def _bits(judged: JudgedModel, documents: Sequence[Document], progress: Progress) -> list[float]:
    """Returns bits per byte of the whole text of each document; questions of a conversation are included."""
    rows = text_costs(judged.model, judged.tokenizer, documents, EvaluateConfig(), progress=progress)
    return [row["nats"] / math.log(2) / max(1, row["num_bytes"]) for row in rows]


def _compare(
    task: Task,
    benchmark: Benchmark,
    champion: JudgedModel,
    candidate: JudgedModel,
    comparison: PairedComparison,
    config: GateConfig,
    progress: Progress,
) -> list[GateMeasure]:
    """Compares the models on a task: no measure of an old task may be worse; a new task must be better in bits per byte
    and not clearly worse in accuracy.
    """
    documents = benchmark.read(task, "test")
    scores = [_scores(judged, documents, config, progress) for judged in (champion, candidate)]
    measures = []
    for name in scores[0]:
        is_cost = name.startswith("bits")
        rule: Rule = "not worse" if task == "old" else "better" if is_cost else "not clearly worse"
        measure = comparison.costs if is_cost else comparison.accuracy
        measures.append(measure(task, name, rule, scores[0][name], scores[1][name]))
    return measures


def _scores(
    judged: JudgedModel, documents: Sequence[Document], config: GateConfig, progress: Progress
) -> Mapping[str, list[dict[str, Any]]]:
    """Returns rows of scores for each measure that the documents allow."""
    model, tokenizer, settings = judged.model, judged.tokenizer, EvaluateConfig()
    costs = record_costs(model, tokenizer, documents, settings, progress=progress)
    spoken = [document for document in documents if document.kind == "qa"]
    choices = score_choices(model, tokenizer, spoken, settings, progress=progress)
    numbers = generate_numbers(model, tokenizer, spoken, max_new_tokens=config.max_new_tokens, progress=progress)
    scores = {f"bits per byte of {name}": rows for name, rows in costs.items()}
    further = {"multiple choice": choices, "exact match of numbers": numbers}
    return scores | {name: rows for name, rows in further.items() if rows}
