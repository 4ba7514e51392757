"""The ledger: which claims there are, and measuring them by name.

`prove` measures and judges, `rejudge` judges stored measurements. A measurement is written once; verdicts follow from
it by the present rules whenever the pages are written. Each technique is in its claim's module.
"""

import importlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError
from modelwright.core.extensions import installed
from modelwright.core.progress import Progress
from modelwright_claims import published
from modelwright_claims.age import ages
from modelwright_claims.claim import Claim, Setting
from modelwright_claims.page import UNTESTED, render, render_claim, render_untested
from modelwright_claims.promises import read_promises
from modelwright_claims.results import (
    circumstances,
    is_of_now,
    judged,
    judged_for_page,
    measured,
    read_records,
    read_results,
    write_record,
)

NAMES = (
    "gradient_accumulation",
    "larger_batches",
    "warmup_cosine",
    "bf16_mixed",
    "precision_policies",
    "energy",
    "adaptive_precision",
    "packing",
    "int8",
    "half_precision_latency",
    "activation_checkpointing",
    "pipeline_utilisation",
    "three_dimensional_parallelism",
    "gradient_compression",
    "compressed_links",
    "topology",
    "hogwild",
    "cost_of_a_kill",
    "efficiency_20x",
    "loss_scaling",
    "scale_to_a_loss",
    "adaptive_clipping",
    "dynamic_decay",
    "sparse_updates",
    "gated_attention",
    "distillation",
    "serving_qps",
    "first_answer",
    "demo_recipe",
    "data_utilization",
    "loading_latency",
    "silent_errors",
    "dynamic_batching",
    "adaptive_augmentation",
    "ab_false_alarms",
    "alignment_retrieval",
    "ppo_true_reward",
    "grpo_arithmetic",
    "lora_dpo",
    "mixup_cutmix",
    "resnet_precision",
)
"""Modules of the claims about the main package; other packages have their own as entry points of `GROUP`."""
GROUP = "modelwright.claims"


def _claims() -> tuple[Claim, ...]:
    """Return all claims in the order of the published listing, those that it lacks at its end."""
    own = [importlib.import_module(f"{__package__}.{name}").CLAIM for name in NAMES]
    every = [*own, *installed(GROUP, Claim, taken=NAMES).values()]
    places = {row.name: place for place, row in enumerate(published.read())}
    return tuple(sorted(every, key=lambda one: places.get(one.name, len(places))))


CLAIMS = _claims()


def select(names: Sequence[str]) -> list[Claim]:
    """The claims called `names`, in that order; all of them for no names. Unknown names raise `ConfigError`.

    Hyphens stand for underscores.
    """
    names = [name.replace("-", "_") for name in names]
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise ConfigError(f"{name}: is not a claim; the ledger has {', '.join(known)}")
    return [known[name] for name in names] if names else list(CLAIMS)


def prove(
    names: Sequence[str], *, quick: bool, results: Path, progress: Progress
) -> list[tuple[Claim, Mapping[str, Any]]]:
    """Measure the claims called `names` (all for none), one after the other; return them with their records.

    Writes one JSON file per claim into `results`, and the pages of that folder. A claim that the folder has of these
    sources is not measured again, so that an interrupted call continues; tuned values are kept in `results`/tuning.
    """
    outcomes = []
    try:  # before hours of measuring
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{results}: cannot be made ({error.strerror}); name another folder") from None
    stored = read_records(results)
    done = {record["name"]: record for record in stored if record["quick"] == quick and is_of_now(record)}
    with tempfile.TemporaryDirectory(prefix="modelwright-claims-") as scratch:
        setting = Setting(quick=quick, folder=Path(scratch), progress=progress, kept=results / "tuning")
        for claim in select(names):
            record = done.get(claim.name)
            if record is None:
                around, start = circumstances(), time.perf_counter()
                measurement = claim.measure(setting)
                record = measured(claim, measurement, quick=quick, wall_s=time.perf_counter() - start, around=around)
                write_record(record, results)
                write_pages(results, results / "claims.md")
            progress.note(f"{claim.name}: {record['kind']}: {record['reason']}")
            outcomes.append((claim, record))
    return outcomes


def rejudge(
    names: Sequence[str], *, results: Path, page: Path
) -> list[tuple[Claim, Mapping[str, Any], Mapping[str, Any]]]:
    """Judge the stored samples of the claims called `names` (all for none) by the present rules, and renew the pages.

    Returns each claim with its record as stored and as judged now. No record is written.
    """
    records = read_records(results)
    outcomes: list[tuple[Claim, Mapping[str, Any], Mapping[str, Any]]] = [
        (claim, record, judged(claim, record))
        for claim in select(names)
        for record in records
        if record["name"] == claim.name
    ]
    write_pages(results, page)
    return outcomes


def write_pages(results: Path, page: Path) -> None:
    """Renew the claims page from the result files, and a page for each claim in the folder of its name next to it."""
    for path, text in pages(results, page).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


def pages(results: Path, page: Path, *, aged: bool = True) -> dict[Path, str]:
    """Return the texts of all pages by file. aged: with the age of each record, which every commit changes."""
    claims = {claim.name: claim for claim in CLAIMS}
    records = [judged_for_page(claims[one["name"]], one) for one in read_results(results) if one["name"] in claims]
    samples = Path(os.path.relpath(results, page.with_suffix(""))).as_posix()
    found = ages(CLAIMS, records) if aged else {}
    folder = page.with_suffix("")
    promises = read_promises()
    texts = {
        page: render(CLAIMS, records, promises, found, folder=folder.name),
        folder / UNTESTED: render_untested(promises, page=page.name),
    }
    for claim in CLAIMS:
        of_claim = [record for record in records if record["name"] == claim.name]
        texts[folder / f"{claim.name}.md"] = render_claim(claim, of_claim, found, page=page.name, samples=samples)
    return texts


def publish(results: Path) -> None:
    """Renew the package's summary of the records: `published.FILE`, for listings and comparisons without them."""
    claims = {claim.name: claim for claim in CLAIMS}
    records = [judged_for_page(claims[record["name"]], record) for record in read_results(results)]
    write_atomic(published.PATH, published.as_json(CLAIMS, records, read_promises()))
