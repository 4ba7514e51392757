"""The step noise: drops documents that a classifier of trusted text takes for junk, if a test shows its precision.

Training and its test are in `data/clean/noise/cascade.py`, the classifier in `data/clean/noise/classifier.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.data.clean.features import FEATURES
from modelwright.data.clean.measured_corpus import DOCUMENTS, MeasuredCorpus, ShardFiles, unpack_documents
from modelwright.data.clean.noise.cascade import (
    CLASSIFIER,
    FEWEST_WORDS,
    SURELY_TRUSTED,
    Cascade,
    NoiseConfig,
    train_cascade,
)
from modelwright.data.clean.noise.classifier import KnownForms, LinearClassifier
from modelwright.data.clean.steps.step import Columns, Decisions, Drop, Drops, StepSpec
from modelwright.data.clean.words import split_words
from modelwright.data.document import KINDS, Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

_NUM_WORDS = FEATURES.index("num_words")
_STDLIB_FRACTION = 0.1
_CASCADE = "noise.json"
_STAGE = "noise"


@dataclass(frozen=True)
class Noise:
    config: NoiseConfig
    seed: int
    name: str = "noise"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures `judged` [N]: True if a document is long enough, not a pair and not a caption."""
        if "features" in columns:
            num_words = columns["features"][:, _NUM_WORDS]
        else:
            num_words = np.array([len(split_words(document.text)) for document in documents], np.int64)
        is_text = ~np.isin(columns["kind"], [KINDS.index("qa"), KINDS.index("image")])
        return {"judged": is_text & (num_words >= FEWEST_WORDS)}

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        """Trains the classifier, and scores the documents in worker processes. Nothing is scored or dropped if its
        test does not show the promised precision. Raises `DataError` if there are too few trusted samples to learn
        from.
        """
        path = corpus.folder / _CASCADE
        if not path.exists():
            trusted = read_trusted(self.config.trusted, self.config.num_samples)
            trained = train_cascade(trusted, self.config, self.seed, corpus.folder)
            write_atomic(path, json.dumps([asdict(trained[0]), trained[1]]))
        # Read back even if just written: a resumed run must decide by the same values.
        fields, report = json.loads(path.read_text())
        cascade = Cascade(**fields | {"forms": KnownForms(**fields["forms"])})
        if not report["acts"]:
            nothing = dict.fromkeys(("judged", "abstained", "uncertain", "dropped"), 0)
            return Decisions(drops={}, report={"noise": {**report, **nothing}})
        numbers, values, by_model = [np.empty(0, np.int64)], [np.empty(0)], [np.empty(0, np.bool_)]
        num_judged = num_unknown = num_uncertain = 0
        columns = zip(corpus.shards, corpus.starts[:-1], corpus.parts("judged"), strict=True)
        jobs = (
            _ScoreJob(corpus.folder, files, corpus.stage, rows.tolist(), self.config, cascade)
            for files, start, judged in columns
            if len(rows := np.flatnonzero(judged & corpus.alive[start : start + len(judged)]))
        )
        for shard, arrays in corpus.engine.map(score_shard, jobs):
            has_form, is_uncertain = arrays["has_form"], cascade.is_uncertain(arrays["p"])
            num_judged += len(has_form)
            num_unknown += int((~has_form).sum())
            num_uncertain += int((has_form & is_uncertain).sum())
            is_noise = arrays["p"] >= cascade.threshold
            rows = np.flatnonzero(has_form & (is_noise | (arrays["by_model"] >= cascade.model_threshold)))
            numbers.append(corpus.starts[shard] + arrays["rows"][rows])
            values.append(np.where(is_noise, arrays["p"], arrays["by_model"])[rows])
            by_model.append(~is_noise[rows])
        all_numbers, all_values = np.concatenate(numbers), np.concatenate(values)
        all_by_model = np.concatenate(by_model)
        order = np.argsort(all_numbers)

        def drop(place: int) -> Drop:
            index = order[place]
            limit, who = (cascade.model_threshold, " by the model") if all_by_model[index] else (cascade.threshold, "")
            return Drop("noise", f"probability {all_values[index]:.3f}{who}, limit {limit:.3f}")

        counts = {
            "judged": num_judged, "abstained": num_unknown, "uncertain": num_uncertain, "dropped": len(all_numbers)
        }  # fmt: skip
        return Decisions(drops=Drops(all_numbers[order], drop), report={"noise": {**report, **counts}})


NOISE = StepSpec(
    name="noise",
    build=lambda config, seed: Noise(config, seed) if config.enabled else None,
    remedies={"noise": "--clean.noise.trusted []"},
    sources=("trusted",),
    files=("model",),
)


def read_trusted(sources: tuple[str, ...], most: int) -> list[Document]:
    """Reads the first documents of the sources of `clean.noise.trusted`, without pairs, which the step does not judge.
    A tenth of the modules of `stdlib`, the documentation and code on this machine, is enough.
    """
    config = SourceConfig(
        sources=sources, validation_fraction=0.0, on_bad_record="skip", stdlib_fraction=_STDLIB_FRACTION
    )
    documents = read_documents(config, report=SourceReport())
    return list(islice((document for document in documents if document.kind in ("prose", "code")), most))


@dataclass(frozen=True)
class _ScoreJob:
    """Documents of a shard to score. folder: with the classifier; stage: the one that wrote the shard's documents."""

    folder: Path
    files: ShardFiles
    stage: str
    rows: list[int]
    config: NoiseConfig
    cascade: Cascade


def score_shard(job: _ScoreJob) -> tuple[int, dict[str, NDArray[Any]]]:
    """Computes both models' probabilities of noise for some documents, and whether their form is known; in workers."""
    if job.files.facts(_STAGE) is None:
        documents = unpack_documents(job.files.array(job.stage, DOCUMENTS).tobytes())
        texts = [documents[row].text for row in job.rows]
        p = LinearClassifier.load(job.folder / CLASSIFIER).probabilities(texts)
        has_form = np.ones(len(texts), np.bool_)
        # The others are kept whatever their form, and recognizing a language takes time.
        for index in np.flatnonzero(p >= SURELY_TRUSTED):
            has_form[index] = job.cascade.forms.includes(texts[index])
        by_model = np.zeros(len(texts))
        uncertain = np.flatnonzero(has_form & job.cascade.is_uncertain(p))
        if job.config.model and len(uncertain):
            from modelwright.data.clean.noise.model import NoiseModel

            model = NoiseModel(job.config.model, job.config.model_noise_label)
            by_model[uncertain] = job.cascade.by_model(model.scores([texts[index] for index in uncertain]))
        rows = np.array(job.rows, np.int64)
        job.files.write_arrays(_STAGE, {"rows": rows, "p": p, "by_model": by_model, "has_form": has_form}, {})
    return job.files.number, dict(job.files.read_arrays(_STAGE))
