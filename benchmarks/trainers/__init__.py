"""One training job, run by three trainers: ours, Hugging Face Trainer, Lightning."""
