# Trains a small model on text from Python, prints each step, and lets the model write.
# Run it anywhere: python train.py [FILE_OR_FOLDER ...]; without arguments it learns from Python's own documentation.
# The run is an ordinary one: `modelwright run runs/from-python` resumes it, `modelwright report` shows it.
import sys

import modelwright as mw

SETTINGS = {
    "data": {"stdlib_fraction": 0.02},
    "pretrain": {"num_steps": 20, "eval_every_steps": 10},
    "stages": ["clean", "tokenize", "pack", "pretrain", "report"],
}


def show(step: mw.TrainingStep) -> None:
    """Prints a logged step. If it returned False, training would stop, and the same call would resume it."""
    print(f"{step.stage} {step.step}/{step.num_steps}: loss {step.loss:.3f}, {step.tokens_per_s:,.0f} tokens/s")


def main() -> None:
    run = mw.run("tiny", sys.argv[1:] or None, name="from-python", on_step=show, **SETTINGS)
    print(run.model().generate("The function returns", max_tokens=30))
    print("report:", run.report)


if __name__ == "__main__":
    main()
