"""The report's watch list: steps that stand out, and what to do about each kind."""

from collections import Counter

from modelwright.core.event_log import EventKind
from modelwright.pipeline.report.blocks import Block, Excerpt, Fold, Note
from modelwright.pipeline.report.format import count, first_lines
from modelwright.pipeline.report.run_data import StageData

_EVENTS_SHOWN = 40


EVENT_KINDS = {
    "gradient_outlier": EventKind(
        "gradient-norm outliers",
        "Single ones are ordinary. Nothing needs to be done as long as the loss goes on falling; if it jumps at the "
        "same steps, lower learning_rate or max_grad_norm.",
        is_ordinary=True,
    ),
    "loss_spike": EventKind(
        "loss spikes",
        "If the loss does not return to its course, lower learning_rate, or have such batches skipped "
        "(loss_spikes.num_sigmas).",
    ),
    "nonfinite_step": EventKind(
        "steps that were not finite",
        "These updates were skipped. If there are many, lower learning_rate or use a wider number format "
        "(precision.policy).",
    ),
    "empty_step": EventKind(
        "steps without anything to learn", "Look at the examples of packed rows (modelwright report RUN)."
    ),
    "skipped_spike": EventKind(
        "spikes skipped",
        "Look at the batches that were skipped, in loss_spikes.jsonl; skip fewer with a higher loss_spikes.num_sigmas.",
    ),
    "rollback": EventKind("rollbacks to earlier weights", "If they recur, lower learning_rate."),
    "straggler": EventKind(
        "slow ranks", "Look at the load and the network of the hosts that are named (modelwright doctor)."
    ),
    "data_stall": EventKind(
        "data stalls",
        "Training waited for data: look at the disk and at other processes (modelwright doctor), or read rows ahead "
        "(cache.enabled).",
    ),
    "out_of_memory": EventKind(
        "steps out of memory", "Raise gradient_accumulation_steps, so that no step is made twice."
    ),
}
"""By the kind that a monitor reports."""


def watch_blocks(stage: StageData) -> list[Block]:
    """The kinds of events with advice, and the first steps; amber only if a kind is not ordinary."""
    events = stage.watch()
    if not events:
        return [Note("Watch list: no loss spike, gradient-norm outlier, non-finite step or data stall.", "good")]
    kinds = Counter(event["kind"] for event in events)
    notes: list[Block] = []
    for name, times in kinds.most_common():
        kind = EVENT_KINDS.get(name, EventKind(name, "See anomalies.jsonl."))
        text = f"Watch list: {kind.name}: {count(times)}. {kind.advice}"
        notes.append(Note(text, "plain" if kind.is_ordinary else "warning"))
    lines = [f"step {event['step']:>6}  {event['text']}" for event in events]
    return [
        *notes,
        Fold("Steps on the watch list", [Excerpt("", first_lines(lines, _EVENTS_SHOWN, "anomalies.jsonl"))]),
    ]
