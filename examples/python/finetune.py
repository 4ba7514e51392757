# Fine-tunes a model folder on conversations that are in memory, and compares the result with the model before.
# Run it as python finetune.py MODEL_FOLDER EXAMPLES.jsonl; each line of the file is {"messages": [...]}.
# With lora=True only adapters are trained, and merged at the end.
import json
import sys
from pathlib import Path

import modelwright as mw


def main(model: str, path: str) -> None:
    records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    heldout, train = records[:10], records[10:]
    run = mw.finetune(
        model, train, lora=True, run_dir="runs/tuned", sft={"num_steps": 10, "learning_rate": 5e-3, "num_epochs": 0}
    )
    comparison = mw.compare(model, run.path, heldout, resamples=200, max_new_tokens=8)
    print(comparison)
    print(run.model().chat(heldout[0]["messages"][:1], max_tokens=12, temperature=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
