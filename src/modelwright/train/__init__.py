"""The trainer: steps, accumulation, resume, checkpoints, metrics. Contains no loss formula."""
