"""Claim: a reader learns exactly what a training file says, or says so: the share of silent errors on small files.

Each file of `reader_cases` goes through a tool's own reader up to the token ids and labels that it would train on, and
`reader_outcomes` compares these with what the file says. Other tools run in `reader_worker`, each by an interpreter of
its own.
"""

import gc
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.resources import versions
from modelwright_claims import reader_worker
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.launch import answer_of
from modelwright_claims.reader_cases import AXOLOTL, CASES, FACTORY, OURS, ROW_LEN, TRL
from modelwright_claims.reader_outcomes import OUTCOMES, SILENT, Reading, outcome_of, read_own, write_model
from modelwright_claims.statistics import Estimate, exact, share

PYTHONS: Mapping[str, tuple[str, str]] = {
    TRL: ("MODELWRIGHT_TRL", ".venv-trl/bin/python"),
    FACTORY: ("MODELWRIGHT_LLAMAFACTORY", ".venv-llamafactory/bin/python"),
    AXOLOTL: ("MODELWRIGHT_AXOLOTL", ".venv-axolotl/bin/python"),
}
"""The variable that names the interpreter of each other tool, and where `make reader-peers` puts it."""
TIMEOUT_S = 1500.0
MOST_CHARS = 240
OUTCOME, DOCUMENTED = "outcome, ", "documented, "


def find_interpreters() -> dict[str, tuple[str, str]]:
    """Return interpreter and version of each other tool that is installed."""
    found = dict[str, tuple[str, str]]()
    for tool, (variable, default) in PYTHONS.items():
        python = os.path.abspath(os.environ.get(variable) or default)  # a link to an interpreter is another one
        if os.path.isfile(python) and (version := _run(python, tool, {})):
            found[tool] = (python, version)
    return found


def measure(setting: Setting) -> Measurement:
    """Every tool that is installed reads every file; the quick form leaves the other tools out."""
    installed = {} if setting.quick else find_interpreters()
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        folder = Path(name).resolve()
        tokenizer, paths = write_model(folder / "model"), list[Path]()
        for number, case in enumerate(CASES):
            paths.append(folder / f"{number:02d}" / f"records{case.suffix}")
            paths[-1].parent.mkdir()
            paths[-1].write_bytes(case.content)
        gc.freeze()  # a run collects garbage after each stage, which takes longer than to read a file of five records
        readings = {OURS: [read_own(case, path, folder / "model") for case, path in zip(CASES, paths, strict=True)]}
        gc.unfreeze()
        for tool, (python, version) in installed.items():
            setting.progress.note(f"silent_errors: {tool} {version} reads {len(CASES)} files")
            readings[tool] = read_others(tool, python, paths, folder / "model")
    samples = dict[str, list[float]]()
    conditions: dict[str, str | int] = {
        **described(__name__), "cases": "; ".join(case.name for case in CASES),
        "tools that are not installed": ", ".join(tool for tool in PYTHONS if tool not in installed) or "none",
        f"version of {OURS}": versions("modelwright").get("modelwright", ""),
        **{f"version of {tool}": version for tool, (_, version) in installed.items()},
    }  # fmt: skip
    for tool, read in readings.items():
        found = [outcome_of(case, one, tokenizer) for case, one in zip(CASES, read, strict=True)]
        found = [(kind, " ".join(why.replace(f"{folder}/", "").split())) for kind, why in found]
        samples[OUTCOME + tool] = [float(kind) for kind, _ in found]
        samples[DOCUMENTED + tool] = [float(case.is_documented(tool)) for case in CASES]
        for kind, outcome in enumerate(OUTCOMES):
            shown = [
                f"{case.name} ({why[:MOST_CHARS]})" if why else case.name
                for case, (one, why) in zip(CASES, found, strict=True) if one == kind
            ]  # fmt: skip
            conditions[f"{outcome}, {tool}"] = "; ".join(shown) or "none"
    return Measurement(samples=samples, conditions=conditions)


def read_others(tool: str, python: str, paths: Sequence[Path], model: Path) -> list[Reading]:
    """Have another tool read all files."""
    cases = [
        {"path": str(path), "form": case.form, "stage": case.stage, "names": dict(case.names), "columns": case.columns}
        for case, path in zip(CASES, paths, strict=True)
    ]
    with tempfile.TemporaryDirectory(dir=model.parent) as place:
        task = {"model": str(model), "row_len": ROW_LEN, "cases": cases, "folder": place}
        return [Reading(**one) for one in _run(python, tool, task)]


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment, rivals = Judgment(), [tool for tool in names_between(samples, OUTCOME) if tool != OURS]
    ours = samples[OUTCOME + OURS]
    silent = sum(one == SILENT for one in ours)
    judgment.ask(f"silent errors, {OURS}", exact(silent), "", say=f"{{0.mean:.0f}} silent errors in {len(ours)} files")
    judgment.require(not silent, f"silent: {conditions[f'{OUTCOMES[SILENT]}, {OURS}']}" if silent else "")
    for tool in (OURS, *rivals):
        judgment.note(f"silent, {tool}, all files", _silent(samples[OUTCOME + tool], [1.0] * len(ours)), "%")
        for kind, outcome in enumerate(OUTCOMES):
            judgment.note(f"{outcome}, {tool}", exact(sum(one == kind for one in samples[OUTCOME + tool])), "files")
    for tool in rivals:
        documented = samples[DOCUMENTED + tool]
        theirs, own = _silent(samples[OUTCOME + tool], documented), _silent(ours, documented)
        judgment.note(f"silent, {tool}, documented", theirs, "%")
        say = f"of {own.count} files in forms that {tool} documents, {theirs.mean:.0f}% are silent errors there"
        what, name = f"share of silent errors on what {tool} documents", f"silent, {OURS}, documented by {tool}"
        judgment.ask(name, own, "%", "<", theirs.lower, what=what, say=say)
    if not rivals:
        judgment.lacking.append("samples of another tool")
    return judgment.verdict()


def _silent(outcomes: Sequence[float], chosen: Sequence[float]) -> Estimate:
    """The share of silent errors among the chosen files, in percent."""
    return share([float(one == SILENT) for one, is_chosen in zip(outcomes, chosen, strict=True) if is_chosen])


def _run(python: str, tool: str, task: Mapping[str, Any]) -> Any:
    """Run `reader_worker` on a task; without one, return the version of the tool, "" where it is not installed."""
    folder = task.get("folder")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
        "AXOLOTL_DO_NOT_TRACK": "1",
        **({"HF_HOME": folder} if folder else {}),
    }  # fmt: skip
    return answer_of(
        [python, "-P", reader_worker.__file__, tool], f"{tool} by {python}", text=json.dumps(task), env=environment,
        timeout=TIMEOUT_S, cwd=folder,
    )  # fmt: skip


CLAIM = declared(__name__)
