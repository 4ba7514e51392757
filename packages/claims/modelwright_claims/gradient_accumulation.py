"""Claim: gradient accumulation with the right normalizer gives the gradient of the whole batch, ragged or not.

The loop's gradient is caught where it would leave for the network, after its own microbatching and normalizing. It is
compared with autograd on the whole batch at once, and next to it stands the usual mistake: the mean of the
microbatches' mean losses. The cost of accumulation on the way to a fixed loss is measured, too.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from modelwright.core.artifacts import StageDir
from modelwright.core.config import derive_seed
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import single
from modelwright.train.build import train
from modelwright.train.job import TrainJob, all_reduce_by
from modelwright.train.objective import Objective, Terms, forward
from modelwright_claims import stability_bench as bench
from modelwright_claims import workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import exact

PARTS = 4
WHOLE, ACCUMULATED, SMALL = "whole batches", f"{PARTS} microbatches", "small batches, not accumulated"


def measure_pace(setting: Setting) -> Measurement:
    """Five paired seeds; in quick mode two, at one rate."""
    size = bench.study_size(setting)
    small = replace(size, batch_rows=size.batch_rows // PARTS, num_steps=size.num_steps * PARTS)
    variants = {
        WHOLE: bench.variant(size, {}),
        ACCUMULATED: bench.variant(size, {"gradient_accumulation_steps": PARTS}),
        SMALL: bench.variant(small, {}),
    }
    return bench.paces(bench.steps_to_a_loss(setting, variants, plain=WHOLE))


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    worst = {name: max(samples[name]) for name in ERRORS}
    largest = max(worst["loop, FP64, full"], worst["loop, FP64, ragged"])
    mistake = 100 * worst["mean of means, FP64, ragged"]
    judgment.ask("largest relative error, FP64", exact(largest), "", "<=", EXACT, what="relative error in FP64")
    judgment.note("mean of means, ragged batch", mistake, "%")
    judgment.show(
        samples={name: [value] for name, value in worst.items()},
        names={f"largest relative error: {name}": name for name in worst},
    )
    judgment.said.append(
        f"the accumulated gradient differs from the whole batch's by {largest:.1e} of its norm in FP64 (at most "
        f"{EXACT:.0e} is rounding); the mean of means is off by {mistake:.1f}% on the same ragged batch"
    )
    bench.show_paces(judgment, samples, conditions, (WHOLE, ACCUMULATED, SMALL))
    return judgment.verdict()


MICROBATCHES = (1, 2, 4, 8)
EXACT = 1e-12
"""Relative error in FP64 that is rounding and nothing else (its unit is 1.1e-16)."""
SEED = 7
ERRORS = tuple(
    f"{name}, {rows}" for rows in ("full", "ragged") for name in ("loop, FP32", "loop, FP64", "mean of means, FP64")
)


@dataclass(frozen=True)
class ExactNextToken(Objective):
    """Next-token prediction by its definition, in the model's own precision; the fused loss sums in FP32."""

    source: PackedLoader

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return NextToken(self.source).batches(model, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return NextToken(self.source).weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        logits_NV, labels_N = model.logits(output).flatten(0, 1), batch.labels_BT.flatten()
        return Terms({"loss": F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")})


@dataclass
class Tap:
    """A transport that sends nothing and keeps a copy of the gradient that it was given."""

    bytes_sent: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        self.kept = [gradient.detach().clone() for gradient in gradients]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def measure(setting: Setting) -> Measurement:
    """Errors of the loop's gradient and of the mean of means, on full rows and on ragged ones."""
    size = replace(workbench.size(setting), batch_rows=16)
    text = workbench.prepare_text(setting)
    errors: dict[str, list[float]] = {}
    shares = {}
    modes: dict[str, workbench.Mode] = {"full": "best_fit", "ragged": "one_per_row"}
    for kind, mode in modes.items():
        rows = workbench.packed_rows(setting, seq_len=size.seq_len, mode=mode, split="train")
        loader = PackedLoader(rows, batch_rows=size.batch_rows, seed=SEED)
        shares[kind] = loader.batch(0).num_targets / size.batch_tokens
        model = Decoder(size.model_config(text.vocab_size))
        model.init_weights(derive_seed(SEED, "weights"))
        errors[f"loop, FP32, {kind}"] = errors_of_loop(setting, size, model, NextToken(loader))
        model = model.double()
        exact = ExactNextToken(loader)
        errors[f"loop, FP64, {kind}"] = errors_of_loop(setting, size, model, exact)
        whole = whole_batch_gradient(model, exact)
        means = [mean_of_means_gradient(model, exact, parts) for parts in MICROBATCHES]
        errors[f"mean of means, FP64, {kind}"] = [relative_error(mean, whole) for mean in means]
    pace = measure_pace(setting)
    return Measurement(
        samples={**errors, **pace.samples},
        conditions={
            **size.describe(),
            "steps": 1,
            "microbatches": ", ".join(map(str, MICROBATCHES)),
            "predicted tokens in the ragged batch": f"{100 * shares['ragged']:.0f}%",
            **pace.conditions,
        },
    )


def errors_of_loop(setting: Setting, size: workbench.Size, model: Decoder, objective: Objective) -> list[float]:
    """Relative errors of the loop's first gradient, for each number of microbatches."""
    whole = whole_batch_gradient(model, objective)
    return [relative_error(loop_gradient(setting, size, model, objective, parts), whole) for parts in MICROBATCHES]


def loop_gradient(
    setting: Setting, size: workbench.Size, model: Decoder, objective: Objective, num_microbatches: int
) -> list[Tensor]:
    """The gradient of batch 0 as THE loop accumulates it. The model is left as it was."""
    tap, before = Tap(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        train(
            TrainJob(
                model=model,
                objective=objective,
                config=size.train_config(num_steps=1, gradient_accumulation_steps=num_microbatches),
                num_steps=1,
                stage=StageDir(Path(folder)),
                seed=SEED,
                name="one step",
                input_digest="claim",
                strategy=all_reduce_by(tap),
            ),
            single(),
            SilentProgress(),
        )
    model.load_state_dict(before)
    return tap.kept


def whole_batch_gradient(model: Decoder, objective: Objective) -> list[Tensor]:
    """The gradient of batch 0 by autograd, in one piece."""
    return mean_of_means_gradient(model, objective, 1)


def mean_of_means_gradient(model: Decoder, objective: Objective, num_microbatches: int) -> list[Tensor]:
    """The gradient of the mean over microbatches of each one's mean loss: right only when all count the same."""
    batch = next(objective.batches(model, first=0, rank=0, world_size=1))
    model.zero_grad()
    for part in batch.split(num_microbatches):
        loss = objective.losses(forward(model, part), part, model).losses["loss"]
        (loss / objective.weights(part)["loss"] / num_microbatches).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def relative_error(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """L2 norm of the difference over the L2 norm of the reference, all parameters together."""
    pairs = zip(gradient, reference, strict=True)
    difference = math.fsum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return math.sqrt(difference / math.fsum(float(b.double().square().sum()) for b in reference))


CLAIM = declared(__name__, quick_decides=True)
