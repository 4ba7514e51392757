"""Floor 4: the trainer: steps, accumulation, resume, checkpoints, metrics. Contains no loss formula."""
