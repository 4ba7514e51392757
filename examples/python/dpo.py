# Aligns a model with preferences by DPO: pairs of answers of which people preferred the first.
# Run it as python dpo.py MODEL_FOLDER PAIRS.jsonl; each line is {"prompt": ..., "chosen": ..., "rejected": ...}.
# `rewards/accuracies` is the share of pairs that the model puts in the right order; it begins at 0.5.
import sys

import modelwright as mw


def main(model: str, pairs: str) -> None:
    settings = {"num_steps": 10, "learning_rate": 1e-3, "batch_tokens": 512, "beta": 0.1}
    run = mw.align(model, pairs, method="dpo", name="aligned", dpo=settings, pack={"seq_len": 64}, minutes=0)
    for step in run.metrics()["dpo"]:
        if "rewards/accuracies" in step:
            print(f"step {step['step']}: loss {step['loss']:.3f}, accuracy {step['rewards/accuracies']:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
