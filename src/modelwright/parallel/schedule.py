"""Pipeline schedules as arithmetic: how long ranks wait, and how many microbatches' activations a rank holds.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters", section 2.2 (1F1B, interleaved); Qi et al. 2023, "Zero Bubble Pipeline Parallelism", table 2 and section 6.
The order of work is PyTorch's (`torch.distributed.pipelining.schedules`).
"""

from modelwright.parallel.config import Schedule


def bubble_s(
    schedule: Schedule, *, pipeline: int, stages_per_rank: int, forward_s: float, input_s: float, weight_s: float
) -> float:
    """How long a rank waits in one step.

    forward_s, input_s, weight_s: one microbatch through all of a rank's layers: forward; backward to the input, with
    what is computed again; gradients of weights. GPipe and 1F1B wait (p - 1) times all three, an interleaved schedule
    the v-th part of that. The zero-bubble schedules compute gradients of weights while they would wait: as ZB-H1 with
    one stage on a rank; with two (ZB-V) as much as ZB-H2.
    """
    hops = pipeline - 1
    if schedule == "zero_bubble":
        return hops * max(0.0, forward_s + input_s - stages_per_rank * weight_s)
    rounds = stages_per_rank if schedule == "interleaved" else 1
    return hops * (forward_s + input_s + weight_s) / rounds


def microbatches_in_flight(
    schedule: Schedule, *, pipeline: int, rank: int, stages_per_rank: int, num_microbatches: int
) -> float:
    """How many microbatches' activations of all its layers a pipeline rank holds at most.

    A rank with several stages counts each as that part of a microbatch.
    """
    if pipeline == 1:
        return 1.0
    if schedule == "gpipe":
        return float(num_microbatches)
    hops = pipeline - 1 - rank
    if schedule == "zero_bubble":
        # Rank r puts the gradients of weights off by r microbatches, so all ranks hold equally many.
        return float(min(num_microbatches, pipeline))
    if schedule == "1f1b":
        return float(min(num_microbatches, hops + 1))
    per_round = num_microbatches // max(1, num_microbatches // pipeline)
    held = (stages_per_rank - 1) * per_round + 2 * hops + 1
    return min(held, num_microbatches * stages_per_rank) / stages_per_rank


def bubble_share(*, bubble: float, work: float) -> float:
    """The share of a step's time in which ranks wait; (p - 1) / (m + p - 1) for GPipe and 1F1B."""
    return bubble / (bubble + work) if bubble + work else 0.0
