"""The capacity floor of an update: a model of the same size that was trained on old and new texts together, from
scratch, with the compute of the old model and its update combined.

Forgetting in an update has to be compared with it: a small model that learns everything at once is also worse at old
texts, because its capacity is shared. The floor costs as much as both trainings. Its tokenizer is trained on both
texts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, is_finished, read_manifest, write_artifact, write_atomic
from modelwright.core.config import ConfigError, digest, merge
from modelwright.core.progress import Progress
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document
from modelwright.evaluate.scoring import EvaluateConfig, record_costs
from modelwright.pipeline.run_config import parse_run, read_run_config
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.quantize import QUANTIZE
from modelwright.pipeline.stages.report import REPORT
from modelwright.pipeline.stages.tokenize import TOKENIZE
from modelwright.train.config import LENGTHS
from modelwright_continual.benchmark import TASKS, Benchmark, Task
from modelwright_continual.gate.judge import JudgedModel, load_judged
from modelwright_continual.served import served_folder
from modelwright_continual.update import CarryOut, in_this_process, quantized_folder
from modelwright_continual.update_files import HELDOUT_FILE, NEW, data_folder

FOLDER = "floor"
RESULT = "floor.json"
TEXTS_KIND = "floor-texts"
TEXTS_FILE = "texts.jsonl"


@dataclass(frozen=True, kw_only=True)
class FloorRow:
    """Figures of one model. bits: bits per byte by task, on the benchmark's validation half; flops: of all its
    trainings.
    """

    model: str
    bits: Mapping[Task, float]
    flops: float


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Comparison of the old model, the updated one, and the one trained from scratch, in this order."""

    rows: Sequence[FloorRow]

    def change(self, row: FloorRow, task: Task) -> float:
        """Returns the relative difference in bits per byte from the old model; positive is worse."""
        return row.bits[task] / self.rows[0].bits[task] - 1.0

    def cells(self, row: FloorRow) -> list[str]:
        """Formats a model's bits per byte and change for each task, as tables show them."""
        return [f"{row.bits[task]:.4f} ({self.change(row, task):+.1%})" for task in TASKS]

    def table(self) -> str:
        """Formats the comparison for a terminal."""
        lines = [f"{'bits per byte (validation half)':<32}{'old texts':>20}{'new texts':>20}{'FLOPs':>10}"]
        for row in self.rows:
            lines.append(f"{row.model:<32}{''.join(f'{cell:>20}' for cell in self.cells(row))}{row.flops:>10.2e}")
        return "\n".join(lines)

    @classmethod
    def read(cls, path: Path) -> "Floor":
        return cls(rows=[FloorRow(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]])


def require_from_scratch(model: Path) -> None:
    """Raises `ConfigError`, before anything is trained, if no floor can be made for an update of this model."""
    run = RunDir(model)
    if not run.info.is_file():
        raise ConfigError(f"--floor: {model} is not a run, so its texts and its compute are not known; leave it out")
    config = read_run_config(run.config)
    if config.init_from or config.rows_from:
        raise ConfigError(f"--floor: {model} did not begin with random weights and its own texts; leave it out")


def measure_floor(
    update: RunDir,
    model: Path,
    benchmark: Benchmark,
    *,
    words: Sequence[str],
    progress: Progress,
    carry_out: CarryOut = in_this_process,
) -> Floor:
    """Trains the floor of a finished update in the folder `floor` of its run, or resumes that, and compares the three
    models in the form in which they are served.

    The comparison uses the validation half, because the test half is reserved for the gate. The weight of an average
    was chosen on the same half, which favors the updated model slightly. Raises `ConfigError` as `require_from_scratch`
    does.
    """
    require_from_scratch(model)
    base, run = RunDir(model), RunDir(update.path / FOLDER)
    texts = _write_texts(update, base, run.create().path / "texts")
    config = floor_config(update, base, texts)
    carry_out(config, run, origin=f"capacity floor of {update.path}", words=words, progress=progress)
    folders = {"old model": served_folder(model), "updated": quantized_folder(update), "scratch": quantized_folder(run)}
    kernels = read_run_config(update.config).serve.int8
    flops = {"old model": _flops(base), "updated": _flops(base) + _flops(update), "scratch": _flops(run)}
    names = {"scratch": "both from scratch (floor)"}
    rows = [
        FloorRow(
            model=names.get(name, name),
            bits=_bits(load_judged(folder, kernels), benchmark, progress),
            flops=flops[name],
        )
        for name, folder in folders.items()
    ]
    floor = Floor(rows=rows)
    write_atomic(update.path / RESULT, json.dumps(asdict(floor), indent=1))
    return floor


def floor_config(update: RunDir, base: RunDir, texts: Path) -> RunConfig:
    """Derives the configuration from that of MODEL's run, with the texts of both trainings and enough steps for the
    compute of both. The compute of an update's stage is added to the stage of the same name, or to the last training.
    """
    plain = read_run_config(base.config).plain()
    trainings = [stage.name for stage in read_run_config(base.config).trainings]
    further = _flops_by_stage(update)
    own = _flops_by_stage(base)
    lengths: dict[str, Any] = {}
    for name in trainings:
        taken = {stage for stage in further if stage == name or (stage not in trainings and name == trainings[-1])}
        # FLOPs are proportional to steps, so the steps grow by the ratio of FLOPs.
        factor = 1.0 + sum(further[stage] for stage in taken) / own[name] if own[name] else 1.0
        num_steps = read_manifest(base.stage(name).artifact).facts.get("num_steps", 0)
        lengths[name] = {"num_steps": math.ceil(num_steps * factor)}
        plain[name] = {key: value for key, value in plain[name].items() if key not in LENGTHS}
    over = {
        "name": f"{update.path.resolve().name}-floor",
        "minutes": 0.0,
        "stages": [CLEAN.name, TOKENIZE.name, PACK.name, *trainings, QUANTIZE.name, REPORT.name],
        "data": {"sources": [str((texts / TEXTS_FILE).resolve())], "own_answers": "train"},
        CLEAN.name: {"decontamination": {"sources": [str((data_folder(update) / HELDOUT_FILE).resolve())]}},
        **lengths,
    }
    return parse_run(merge(plain, over))


def _write_texts(update: RunDir, base: RunDir, folder: Path) -> Path:
    """Writes the cleaned texts that both trainings used; each document keeps its split."""
    sources = [run.stage(CLEAN.name).artifact for run in (base, update)]
    identity = digest([read_manifest(source).content_digest for source in sources])
    if is_finished(folder) and read_manifest(folder, kind=TEXTS_KIND).digest == identity:
        return folder
    old, new = (read_kept(source) for source in sources)
    # The update's old documents are a replay, so its new ones suffice.
    documents = chain(old, (document for document in new if document.source == NEW))
    with (
        write_artifact(folder, kind=TEXTS_KIND, digest=identity) as draft,
        open(draft.path / TEXTS_FILE, "w", encoding="utf-8") as file,
    ):
        for number, document in enumerate(documents):
            # Numbered, because ids of the two runs may be equal.
            file.write(replace(document, id=f"{number}/{document.id}").to_json() + "\n")
    return folder


def _flops_by_stage(run: RunDir) -> dict[str, float]:
    """Returns the FLOPs of forward and backward passes of each training of a run."""
    names = [stage.name for stage in read_run_config(run.config).trainings]
    return {name: float(read_manifest(run.stage(name).artifact).facts.get("model_flops", 0.0)) for name in names}


def _flops(run: RunDir) -> float:
    return sum(_flops_by_stage(run).values())


def _bits(judged: JudgedModel, benchmark: Benchmark, progress: Progress) -> dict[Task, float]:
    """Returns bits per byte over all documents of each task together."""
    bits: dict[Task, float] = {}
    for task in TASKS:
        documents: Sequence[Document] = benchmark.read(task, "validation")
        costs = record_costs(judged.model, judged.tokenizer, documents, EvaluateConfig(), progress=progress)
        rows = [row for of_one_kind in costs.values() for row in of_one_kind]
        bits[task] = sum(row["nats"] for row in rows) / math.log(2) / sum(row["num_bytes"] for row in rows)
    return bits
