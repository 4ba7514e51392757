# Notices that requests have changed, updates the model in service on new texts, and asks the gate before a release.
# Run it as python drift_and_update.py RUN FOLDER [--SETTING VALUE ...]; it needs pip install 'modelwright[continual]'.
# FOLDER has requests, later, new, old-heldout and new-heldout, each a .jsonl (docs/tutorials/keep-current.md).
import json
import sys
from pathlib import Path

from modelwright.cli.main import main as modelwright
from modelwright_continual.drift.check import check
from modelwright_continual.drift.reference import freeze_reference
from modelwright_continual.drift.requests import read_requests


def main(run: str, folder: str, *settings: str) -> int:
    texts = {path.stem: str(path) for path in Path(folder).glob("*.jsonl")}
    reference = freeze_reference(read_requests([texts["requests"]]), None, Path("drift/v1"))
    report = check(read_requests([texts["later"]]), reference)
    print("drift:", report.alarmed if report.alarm else "none")
    if not report.alarm:
        return 0
    modelwright(["continual", "freeze", "bench", "--old", texts["old-heldout"], "--new", texts["new-heldout"]])
    update = ["continual", "run", run, texts["new"], "--benchmark", "bench", "--run-dir", "runs/update"]
    code = modelwright([*update, "--replay", "0.25", *settings])  # 5 if the gate has refused the update
    verdict = json.loads(Path("runs/update/gate/verdict.json").read_text())
    print("released as runs/update/release" if verdict["passed"] else f"refused: {verdict['reasons']}")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
