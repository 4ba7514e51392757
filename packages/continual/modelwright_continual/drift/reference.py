"""The reference: the distribution of requests at a model's release. It is frozen; a new model gets a new reference."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from scipy.stats import poisson

from modelwright.core.artifacts import is_finished, read_manifest, write_artifact
from modelwright.core.config import ConfigError, DataError, digest, dump, parse
from modelwright.core.progress import Progress, SilentProgress
from modelwright_continual.drift.calibrate import BlockSampler, DriftCalibration, calibrate, null_p_values
from modelwright_continual.drift.config import DriftConfig
from modelwright_continual.drift.embedding import Embedding, ModelEmbedder, NgramEmbedder
from modelwright_continual.drift.features import FEATURES
from modelwright_continual.drift.marginal import Marginal
from modelwright_continual.drift.prompts import PromptReader, Standard
from modelwright_continual.drift.requests import RequestRecord, checked, in_order
from modelwright_continual.drift.sessions import Ints, Units, make_units, session_codes
from modelwright_continual.drift.statistics import adjusted_where_moved
from modelwright_continual.model_files import model_digest

KIND = "drift-reference"
LEAST_WINDOWS = 5
"""Minimum number of windows in a reference; with fewer, its own error would dominate every comparison."""
_LEAST_SHARE_PRESENT = 0.02
"""Minimum share of the reference's records with a value; a feature with fewer is left out."""
_SUSPICIOUS = 0.01
"""Probability threshold for the number of alarms within the reference itself; below it they are not due to chance."""
_MOST_EMBEDDED = 20_000
"""Maximum number of records whose embeddings the reference keeps; from more, whole sessions are drawn."""
_NUM_EXAMPLES = 2000
_EXAMPLE_CHARS = 300


@dataclass(frozen=True, eq=False)
class Example:
    """A record of the reference that reports can show. number: its index among the reference's records."""

    number: int
    session: str
    prompt: str
    answer: str


@dataclass(frozen=True, eq=False)
class DriftReference:
    """A frozen reference. blocks [N]: session, within its window, of each record; embedded [E]: indices of the records
    with `embeddings` [E, D], which are standardized; model_digest: "" if it was frozen without a model.
    """

    config: DriftConfig
    marginals: Sequence[Marginal]
    calibration: DriftCalibration
    blocks: Ints
    max_user_share: float
    reader: PromptReader
    standard: Standard
    embedded: Ints
    embeddings: Embedding
    examples: Sequence[Example]
    versions: Sequence[str]
    model_digest: str
    digest: str
    self_alarms: int
    """Number of the reference's own windows that alarm when they are compared with the whole reference."""

    @property
    def has_embedding(self) -> bool:
        return len(self.embedded) > 0

    @property
    def num_windows(self) -> int:
        return len(self.blocks) // self.config.window_requests

    def calibration_line(self) -> str:
        """Describes the calibrated run length for the terminal."""
        one = self.calibration
        return (
            f"one false alarm in {one.run_length:.0f} windows of {self.config.window_requests:,} requests is expected "
            f"(95% interval {one.low:.0f} to {one.high:.0f})"
        )

    def warning(self) -> str:
        """Returns a warning that the calibrated run length is not reliable, or "" if it is."""
        expected = self.num_windows / self.calibration.run_length
        if float(poisson.sf(self.self_alarms - 1, expected)) > _SUSPICIOUS:
            return ""
        return (
            f"{self.self_alarms} of the reference's own {self.num_windows} windows differ from all of it, so traffic "
            "changes within the reference and alarms will come more often; use larger windows or a steadier time"
        )


def freeze_reference(
    records: Sequence[RequestRecord],
    model_folder: Path | None,
    folder: Path,
    config: DriftConfig | None = None,
    progress: Progress | None = None,
) -> DriftReference:
    """Writes the reference of `records` to `folder` and returns it.

    model_folder: folder of the served model, for perplexities and embeddings. Raises `ConfigError` if `folder` already
    contains a reference, and `DataError` for invalid or too few request records.
    """
    config, progress = config or DriftConfig(), progress or SilentProgress()
    if is_finished(folder):
        raise ConfigError(
            f"{folder}: already contains a reference, which never changes; choose another folder for a new one"
        )
    records = in_order(checked((f"record {number}", record) for number, record in enumerate(records, start=1)))
    if len(records) < LEAST_WINDOWS * config.window_requests:
        raise DataError(
            f"the reference has {len(records):,} requests; it needs at least {LEAST_WINDOWS} windows of "
            f"{config.window_requests:,}: collect more, or set smaller windows"
        )
    model = None if model_folder is None else ModelEmbedder(model_folder)
    built = _build(records, model, model_folder, config, progress)
    with write_artifact(folder, kind=KIND, digest=built.digest, inputs={"model": built.model_digest}) as draft:
        _save(built, draft.path)
        draft.facts.update(requests=len(records), self_alarms=built.self_alarms, level=built.calibration.level)
    # Loading it checks the files that were just written, and gives the same object as later commands get.
    return load_reference(folder, model_folder)


def load_reference(folder: Path, model_folder: Path | None = None) -> DriftReference:
    """Loads a reference. model_folder: current folder of the model, if the reference was frozen with one.

    Raises `ArtifactError` if files are damaged, and `ConfigError` for another model than the reference's.
    """
    manifest = read_manifest(folder, kind=KIND, verify=True)
    facts = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    arrays = load_file(folder / "arrays.safetensors")
    expected = facts["model_digest"]
    if expected and model_folder is None:
        raise ConfigError(f"{folder}: was frozen with a model; give its folder with --model")
    if model_folder is not None and model_digest(model_folder) != expected:
        raise ConfigError(
            f"--model: {model_folder} is not the model that {folder} was frozen with; freeze a new reference"
        )
    units = Units(arrays["blocks"], np.ones(int(arrays["blocks"].max()) + 1))
    marginals = [
        Marginal(one["name"], one["kind"], arrays[f"values.{one['name']}"], units, tuple(one["categories"]))
        for one in facts["marginals"]
    ]
    return DriftReference(
        config=parse(DriftConfig, facts["config"]),
        marginals=marginals,
        calibration=DriftCalibration(nulls=arrays["nulls"], **facts["calibration"]),
        blocks=arrays["blocks"],
        max_user_share=facts["max_user_share"],
        reader=PromptReader(
            NgramEmbedder(arrays["frequencies"], facts["num_sessions"]),
            None if model_folder is None else ModelEmbedder(model_folder),
        ),
        standard=Standard(arrays["center"], arrays["scale"]),
        embedded=arrays["embedded"],
        embeddings=arrays["embeddings"],
        examples=[Example(**one) for one in facts["examples"]],
        versions=facts["versions"],
        model_digest=expected,
        digest=manifest.digest,
        self_alarms=facts["self_alarms"],
    )


def _build(
    records: Sequence[RequestRecord],
    model: ModelEmbedder | None,
    model_folder: Path | None,
    config: DriftConfig,
    progress: Progress,
) -> DriftReference:
    sessions, users_of_session = session_codes(records)
    blocks, users = _blocks(sessions, users_of_session, config.window_requests)
    share = _busiest_user(blocks, users, config.window_requests)
    rng = np.random.default_rng(config.seed)
    units = Units(blocks, np.ones(len(users)))
    texts = [record.get("prompt") or "" for record in records]
    reader = PromptReader(NgramEmbedder.fit(texts, sessions), model)
    scores = reader.scores(texts, progress)
    columns = [(one, one.values(records, scores)) for one in FEATURES]
    marginals = [Marginal.of(one.name, one.kind, values, units) for one, values in columns if _is_usable(values)]
    has_texts = _is_usable([text or None for text in texts])
    embeddings = reader.embed(texts, progress, is_reference=True)
    standard = Standard.fit(embeddings)
    embedded = _whole_blocks(blocks, len(users), _MOST_EMBEDDED, rng) if has_texts else np.empty(0, dtype=np.int64)
    if not marginals and not has_texts:
        raise DataError("the reference has neither texts nor feedback, so there is nothing to compare")
    sampler = BlockSampler(blocks, users, share)
    calibration = calibrate(marginals, sampler, config, with_embedding=has_texts, progress=progress)
    ids = hashlib.sha256("\n".join(record["id"] for record in records).encode()).hexdigest()
    model_hash = "" if model_folder is None else model_digest(model_folder)
    return DriftReference(
        config=config,
        marginals=marginals,
        calibration=calibration,
        blocks=blocks,
        max_user_share=share,
        reader=reader,
        standard=standard,
        embedded=embedded,
        embeddings=standard.apply(embeddings[embedded]),
        examples=_examples(records, rng.permutation(embedded if has_texts else len(records))),
        versions=sorted({str(record["version"]) for record in records if record.get("version")}),
        model_digest=model_hash,
        digest=digest({"requests": ids, "config": dump(config), "model": model_hash}),
        self_alarms=_self_alarms(marginals, blocks, users, share, calibration, config),
    )


def _is_usable(values: Sequence[Any]) -> bool:
    """Returns whether enough records have a value, and not all have the same one."""
    present = [one for one in values if one is not None]
    return len(present) >= max(1, _LEAST_SHARE_PRESENT * len(values)) and len(set(present)) > 1


def _blocks(sessions: Ints, users_of_session: Ints, window_requests: int) -> tuple[Ints, Ints]:
    """Returns the block of each record [N], a session within a window, and the user of each block [F]."""
    windows = np.arange(len(sessions)) // window_requests
    # One number for each pair of window and session.
    keys, blocks = np.unique(windows * len(users_of_session) + sessions, return_inverse=True)
    return blocks, users_of_session[keys % len(users_of_session)]


def _busiest_user(blocks: Ints, users: Ints, window_requests: int) -> float:
    """Returns the largest share of a whole window's sessions that belonged to one user."""
    starts = range(0, len(blocks) - window_requests + 1, window_requests)
    of_windows = [users[np.unique(blocks[start : start + window_requests])] for start in starts]
    return max(float(np.bincount(owners).max() / len(owners)) for owners in of_windows)


def _whole_blocks(blocks: Ints, num_blocks: int, most: int, rng: np.random.Generator) -> Ints:
    """Returns the records of randomly drawn blocks, at most about `most`, in their original order."""
    sizes = np.bincount(blocks, minlength=num_blocks)
    order = rng.permutation(num_blocks)
    chosen = order[: max(1, int(np.searchsorted(np.cumsum(sizes[order]), most, side="right")))]
    return np.flatnonzero(np.isin(blocks, chosen))


def _self_alarms(
    marginals: Sequence[Marginal],
    blocks: Ints,
    users: Ints,
    share: float,
    calibration: DriftCalibration,
    config: DriftConfig,
) -> int:
    """Counts the reference's windows that alarm by their marginals: many do if traffic changes in slow rhythms, which
    the bootstrap of sessions does not reproduce.
    """
    count = 0
    for start in range(0, len(blocks) - config.window_requests + 1, config.window_requests):
        here = slice(start, start + config.window_requests)
        kept, codes = np.unique(blocks[here], return_inverse=True)
        units = make_units(codes, users[kept], share)
        distances = [marginal.compare(marginal.values[here], units) for marginal in marginals]
        p_values = null_p_values(np.array([one.statistic for one in distances]), calibration.nulls)
        adjusted = adjusted_where_moved(p_values, np.array([one.effect for one in distances]), config.min_effect)
        count += bool(len(p_values)) and float(adjusted.min()) <= calibration.level
    return count


def _examples(records: Sequence[RequestRecord], numbers: NDArray[np.int64]) -> list[Example]:
    chosen = numbers[:_NUM_EXAMPLES].tolist()
    return [Example(number, *example_texts(records[number])) for number in chosen]


def example_texts(record: RequestRecord) -> tuple[str, str, str]:
    """Returns session, prompt and answer of a record, shortened for reports."""
    prompt, answer = ((record.get(name) or "")[:_EXAMPLE_CHARS] for name in ("prompt", "answer"))
    return str(record.get("session") or record["id"]), prompt, answer


def _save(reference: DriftReference, folder: Path) -> None:
    calibration = reference.calibration
    arrays = {f"values.{one.name}": one.values for one in reference.marginals}
    arrays |= {
        "nulls": calibration.nulls,
        "blocks": reference.blocks,
        "frequencies": reference.reader.ngrams.frequencies,
        "center": reference.standard.center,
        "scale": reference.standard.scale,
        "embedded": reference.embedded,
        "embeddings": reference.embeddings,
    }
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "arrays.safetensors")
    facts = {
        "config": dump(reference.config),
        "marginals": [
            {"name": one.name, "kind": one.kind, "categories": one.categories} for one in reference.marginals
        ],
        "calibration": {name: getattr(calibration, name) for name in ("level", "run_length", "low", "high")},
        "max_user_share": reference.max_user_share,
        "num_sessions": reference.reader.ngrams.num_sessions,
        "examples": [vars(one) for one in reference.examples],
        "versions": reference.versions,
        "model_digest": reference.model_digest,
        "self_alarms": reference.self_alarms,
    }
    (folder / "reference.json").write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
