# Trains a model by GRPO on a reward that is a function of yours: here, answers should be short and end with a period.
# Run it as python grpo.py MODEL_FOLDER QUESTIONS.jsonl; each line is {"question": ..., "answer": ...}.
# The function gets each answer with its prompt and the record's fields; docs/rewards.md has the other kinds of rewards.
import sys

import modelwright as mw
from modelwright.reward.reward import Sample


def brevity(sample: Sample) -> float:
    """Returns a reward from 0 to 1.5. An exception or NaN leaves the answer out of training, and is counted."""
    return 1 / (1 + len(sample.answer)) + 0.5 * sample.answer.endswith(".")


def main(model: str, questions: str) -> None:
    settings = {
        "num_steps": 4,
        "batch_tokens": 512,
        "num_generations": 4,
        "learning_rate": 1e-3,
        "rewards": {"brevity": {"kind": "function", "path": f"{__file__}:brevity"}},
    }
    further = {"pack": {"seq_len": 64}, "rollout": {"max_completion_length": 8}, "minutes": 0}
    run = mw.align(model, questions, method="grpo", name="short-answers", grpo=settings, **further)
    for step in run.metrics()["grpo"]:
        if "rewards/brevity/mean" in step:
            print(f"step {step['step']}: mean reward {step['rewards/brevity/mean']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
