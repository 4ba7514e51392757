"""reward: a reward model, learned from preference pairs. Later stages continue with the language model from before it;
those that learn from rewards may score answers with the reward model.

Artifact: a sequence-classification folder of `transformers` with one label. Facts: `heldout_pairs`, its accuracy and
calibration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from modelwright.data.rows.loader import PackedRows
from modelwright.model.hf import save_sequence_classifier
from modelwright.objectives.preference import HEAD, Pairs, RewardModelConfig, RewardModeling, reward_model
from modelwright.parallel.mesh import single
from modelwright.pipeline.report.blocks import Block, Chart, Fact, Table, count, number, percent
from modelwright.pipeline.report.charts import Line, line_chart
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stages.dpo import PAIR_ROWS
from modelwright.pipeline.stages.pack import PACK, needed_start
from modelwright.pipeline.stages.training import TrainedModel, metric_charts, training_spec

NUM_BINS = 10


@dataclass(frozen=True, kw_only=True)
class ConfidenceBin:
    """The pairs whose confidence is from `low` to `high`."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean confidence."""
    accuracy: float
    """Share of pairs in the right order."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Accuracy and calibration on held-out pairs."""

    num_pairs: int
    accuracy: float
    """Share of pairs whose chosen answer has the higher reward."""
    expected_error: float
    """Expected calibration error: |confidence - accuracy|, averaged over the bins by their numbers of pairs (Naeini et
    al. 2015)."""
    brier_score: float
    """Mean squared difference of 1 and the predicted probability that the chosen answer is better (Brier 1950)."""
    log_loss: float
    """Mean negative logarithm of that probability, nats."""
    bins: Sequence[ConfidenceBin]
    """Bins with at least one pair, from low to high confidence."""


def calibration(differences_P: np.ndarray) -> Calibration:
    """Judge the differences of rewards, chosen minus rejected, [P]; the probability that the chosen answer is better is
    the logistic function of its difference. The confidence of a pair is the probability of the predicted order, from
    0.5 to 1. Raises `ValueError` without pairs.
    """
    if not len(differences_P):
        raise ValueError("at least one pair is needed to judge a reward model")
    differences_P = differences_P.astype(np.float64)
    log_loss_P = np.logaddexp(0.0, -differences_P)
    # The logistic function of |difference|, in a form that cannot overflow.
    confidence_P = np.exp(-np.logaddexp(0.0, -np.abs(differences_P)))
    is_right_P = (1 + np.sign(differences_P)) / 2  # a tie is half right, as its confidence of 0.5 says
    # A confidence of exactly 1 belongs to the last bin.
    places_P = np.minimum(((confidence_P - 0.5) * 2 * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins = [
        ConfidenceBin(
            low=0.5 + place / (2 * NUM_BINS),
            high=0.5 + (place + 1) / (2 * NUM_BINS),
            count=int((places_P == place).sum()),
            confidence=float(confidence_P[places_P == place].mean()),
            accuracy=float(is_right_P[places_P == place].mean()),
        )
        for place in np.unique(places_P).tolist()
    ]
    errors = sum(one.count * abs(one.confidence - one.accuracy) for one in bins)
    return Calibration(
        num_pairs=len(differences_P),
        accuracy=float(is_right_P.mean()),
        expected_error=errors / len(differences_P),
        brier_score=float(np.square(1 - np.exp(-log_loss_P)).mean()),
        log_loss=float(log_loss_P.mean()),
        bins=bins,
    )


LABEL = "reward"
GROUPS_AT_ONCE = 8


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    tokenizer = trained.tokenizer
    named = [tokenizer.id_of(tokenizer.special_tokens.get(name, "")) for name in ("pad_token", "bos_token")]
    candidates = [*named, *range(tokenizer.vocab_size)]
    save_sequence_classifier(
        trained.model,
        trained.folder,
        head=HEAD,
        label=LABEL,
        eos_id=tokenizer.eos_id,
        # A token with which no sequence ends: `transformers` scores at the last one that is not padding.
        pad_id=next(token for token in candidates if token is not None and token not in tokenizer.stop_ids),
    )
    tokenizer.save(trained.folder, max_length=trained.model.config.max_seq_len)
    if not trained.heldout.is_dir():
        return {}
    device = trained.model.embedding.weight.device
    judge = reward_model(trained.model, single(device))
    differences: list[np.ndarray] = []  # the reward of the chosen answer minus that of the rejected one, for each pair
    for batch in PackedRows(trained.heldout).batches(GROUPS_AT_ONCE):
        scores_G2S = judge.piece_scores(batch).cpu().unflatten(0, (-1, 2))
        difference_GS = scores_G2S[:, 0] - scores_G2S[:, 1]
        differences.append(difference_GS[Pairs.of(batch).is_pair_GS].numpy())
    return {"heldout_pairs": asdict(calibration(np.concatenate(differences)))}


def _headline(data: RunData, stage: StageData) -> Sequence[Fact]:
    if not (facts := stage.facts.get("heldout_pairs")):
        return []
    hint = f"of {count(facts['num_pairs'])} held-out pairs in the right order"
    return [Fact("Reward model", percent(facts["accuracy"], 1), hint)]


def _blocks(stage: StageData) -> Sequence[Block]:
    charts = metric_charts(
        stage,
        {
            "Share of pairs in the right order": {"accuracy": "accuracy"},
            "Difference of rewards": {"margin": "chosen minus rejected"},
        },
    )
    if not (facts := stage.facts.get("heldout_pairs")):
        return charts
    points = [(one["confidence"], one["accuracy"]) for one in facts["bins"]]
    lines = [
        # From 0.5: the confidence is that of the answer with the higher reward.
        Line("perfect calibration", [(0.5, 0.5), (1.0, 1.0)], faint=True),
        Line("held-out pairs", points, marks=True, color=1),
    ]
    svg = line_chart(
        lines, name="reward-reliability", x_label="confidence", y_label="share in the right order", percent=True
    )
    caption = (
        f"Of {count(facts['num_pairs'])} held-out pairs {percent(facts['accuracy'], 1)} are in the right order; "
        f"expected calibration error {percent(facts['expected_error'], 1)}, Brier score "
        f"{number(facts['brier_score'], 3)}, log loss {number(facts['log_loss'], 3)}."
    )
    rows = [
        [f"{one['low']:.2f} to {one['high']:.2f}", count(one["count"]), percent(one["confidence"], 1),
         percent(one["accuracy"], 1)]
        for one in facts["bins"]
    ]  # fmt: skip
    header = ["confidence", "pairs", "mean confidence", "in the right order"]
    return [
        *charts,
        Chart("Reliability", svg, caption),
        Table(header, rows, "Reliability on held-out pairs", numeric=(1, 2, 3)),
    ]


_TRAINING = training_spec(
    name="reward",
    title="Training a reward model",
    report_title="Reward model",
    model_title="",  # not a language model that later stages could continue
    objective=lambda inputs: RewardModeling(inputs.loader, inputs.training),
    rows=PAIR_ROWS,
    run_needs=RewardModeling.needs,
    needs=lambda config: (PACK.name, *needed_start(config, "reward")),
    config=RewardModelConfig,
    headline=_headline,
    only_if_named=True,
    loss_unit="",
    blocks=_blocks,
    save=_save,
)
REWARD = replace(_TRAINING, is_reward_model=True)
