"""The number of microbatches whose activations a pipeline rank holds, by schedule.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters", section 2.2 (1F1B, interleaved); Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6.
The order of work is PyTorch's (`torch.distributed.pipelining.schedules`).
"""

from modelwright.parallel.config import Schedule


def microbatches_in_flight(
    schedule: Schedule, *, pipeline: int, rank: int, stages_per_rank: int, num_microbatches: int
) -> float:
    """Returns the largest number of microbatches whose activations a pipeline rank holds for all its layers. A rank
    with several stages counts each as that fraction of a microbatch.
    """
    if pipeline == 1:
        return 1.0
    if schedule == "gpipe":
        return float(num_microbatches)
    if schedule == "zero_bubble":
        # Rank r delays the gradients of weights by r microbatches, so all ranks hold equally many.
        return float(min(num_microbatches, pipeline))
    # Forwards that a rank makes before its first backward returns: one for each later rank, and its own.
    hops = pipeline - 1 - rank
    if schedule == "1f1b":
        return float(min(num_microbatches, hops + 1))
    per_round = num_microbatches // max(1, num_microbatches // pipeline)
    held = (stages_per_rank - 1) * per_round + 2 * hops + 1
    return min(held, num_microbatches * stages_per_rank) / stages_per_rank
