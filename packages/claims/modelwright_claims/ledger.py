"""The ledger: which claims there are, and measuring them by name.

`prove` measures and judges, `rejudge` judges what is stored; both write the result files and the page. Each technique
is in its claim's module.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ConfigError
from modelwright.core.progress import Progress
from modelwright_claims import (
    ab_false_alarms,
    activation_checkpointing,
    adaptive_augmentation,
    adaptive_clipping,
    adaptive_precision,
    alignment_retrieval,
    architecture_search,
    bf16_mixed,
    compressed_links,
    data_utilization,
    demo_recipe,
    distillation,
    dynamic_batching,
    dynamic_decay,
    efficiency_20x,
    federated,
    forgetting,
    gated_attention,
    gradient_accumulation,
    gradient_compression,
    grpo_arithmetic,
    hogwild,
    int8,
    interrupted_run,
    loading_latency,
    lora_dpo,
    loss_scaling,
    mixup_cutmix,
    packing,
    pipeline_utilisation,
    planned_cost,
    planned_memory,
    ppo_true_reward,
    precision_policies,
    resnet_precision,
    serving_qps,
    sparse_updates,
    three_dimensional_parallelism,
    topology,
    update_time,
    warmup_cosine,
    zero_memory,
)
from modelwright_claims.age import ages
from modelwright_claims.claim import Claim, Setting
from modelwright_claims.page import render
from modelwright_claims.results import (
    circumstances,
    judged,
    measured,
    read_records,
    read_results,
    source_commit,
    today,
    write_record,
)

CLAIMS: tuple[Claim, ...] = (
    gradient_accumulation.CLAIM,
    warmup_cosine.CLAIM,
    bf16_mixed.CLAIM,
    precision_policies.CLAIM,
    adaptive_precision.CLAIM,
    packing.CLAIM,
    int8.CLAIM,
    activation_checkpointing.CLAIM,
    zero_memory.CLAIM,
    planned_memory.CLAIM,
    pipeline_utilisation.CLAIM,
    three_dimensional_parallelism.CLAIM,
    gradient_compression.CLAIM,
    compressed_links.CLAIM,
    topology.CLAIM,
    hogwild.CLAIM,
    efficiency_20x.CLAIM,
    loss_scaling.CLAIM,
    adaptive_clipping.CLAIM,
    dynamic_decay.CLAIM,
    sparse_updates.CLAIM,
    gated_attention.CLAIM,
    distillation.CLAIM,
    serving_qps.CLAIM,
    demo_recipe.CLAIM,
    data_utilization.CLAIM,
    loading_latency.CLAIM,
    dynamic_batching.CLAIM,
    adaptive_augmentation.CLAIM,
    planned_cost.CLAIM,
    interrupted_run.CLAIM,
    architecture_search.CLAIM,
    federated.CLAIM,
    forgetting.CLAIM,
    update_time.CLAIM,
    ab_false_alarms.CLAIM,
    alignment_retrieval.CLAIM,
    ppo_true_reward.CLAIM,
    grpo_arithmetic.CLAIM,
    lora_dpo.CLAIM,
    mixup_cutmix.CLAIM,
    resnet_precision.CLAIM,
)


def select(names: Sequence[str]) -> list[Claim]:
    """The claims called `names`, in that order; all of them for no names. Unknown names raise `ConfigError`.

    Hyphens stand for underscores.
    """
    names = [name.replace("-", "_") for name in names]
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise ConfigError(f"{name}: is no claim; the ledger has {', '.join(known)}")
    return [known[name] for name in names] if names else list(CLAIMS)


def listing() -> list[tuple[str, str]]:
    """`(name, statement)` of every claim."""
    return [(claim.name, claim.statement) for claim in CLAIMS]


def prove(
    names: Sequence[str], *, quick: bool, results: Path, page: Path, progress: Progress
) -> list[tuple[Claim, Mapping[str, Any]]]:
    """Measure the claims called `names` (all for none), one after the other; return them with their records.

    Writes one JSON file per claim into `results` and renews `page` (Markdown) from everything in that folder. What a
    claim has tuned is kept in `results`/tuning: a call that was interrupted goes on from there.
    """
    outcomes = []
    for folder in (results, page.parent):
        try:  # before hours of measuring
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be made ({error.strerror}); name another folder") from None
    with tempfile.TemporaryDirectory(prefix="modelwright-claims-") as scratch:
        setting = Setting(quick=quick, folder=Path(scratch), progress=progress, kept=results / "tuning")
        for claim in select(names):
            around = circumstances()
            start = time.perf_counter()
            measurement = claim.measure(setting)
            record = measured(claim, measurement, quick=quick, wall_s=time.perf_counter() - start, around=around)
            write_record(record, results)
            progress.note(f"{claim.name}: {record['kind']}: {record['reason']}")
            write_page(results, page)
            outcomes.append((claim, record))
    return outcomes


def rejudge(
    names: Sequence[str], *, results: Path, page: Path
) -> list[tuple[Claim, Mapping[str, Any], Mapping[str, Any]]]:
    """Judge the stored samples of the claims called `names` (all for none) by the present rules, and renew the page.

    Returns each claim with its record before and after. A file is written only where its record changes, so that a
    second call changes nothing.
    """
    outcomes = []
    date, commit = today(), source_commit()
    records = read_records(results)
    for claim in select(names):
        for before in records:
            if before["name"] == claim.name:
                after = judged(claim, before, date=date, commit=commit)
                if after != before:
                    write_record(after, results)
                outcomes.append((claim, before, after))
    write_page(results, page)
    return outcomes


def write_page(results: Path, page: Path) -> None:
    """Renew the claims page from the result files."""
    page.parent.mkdir(parents=True, exist_ok=True)
    records = read_results(results)
    write_atomic(page, render(CLAIMS, records, ages(CLAIMS, records)))
