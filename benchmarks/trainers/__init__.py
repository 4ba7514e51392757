"""One training job, run by several trainers: ours, nanoGPT, Hugging Face Trainer, Lightning."""
