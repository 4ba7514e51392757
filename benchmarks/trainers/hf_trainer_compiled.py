"""The job on Hugging Face `Trainer` with `torch_compile`."""

from functools import partial

from trainers import hf_trainer

run = partial(hf_trainer.run, compiled=True)
