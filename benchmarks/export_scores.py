"""What exported graphs choose: 500 generated questions by our own code, ONNX Runtime and OpenVINO, one by one.

    python benchmarks/export_scores.py [--run FOLDER] [--questions 500] [--threads 2]

--run: a finished run with the stages `clean` and `qat` (`qat.weights int8`); without it the script trains a small one.
The model before `qat` is exported in FP32, and in INT8 and INT4 as the stage `quantize` makes them; the model of `qat`
with the integers that it was trained on. The questions are those of the evaluation, with four candidates each, of which
a model chooses the likeliest per byte. Graphs are run as their cards say. `OpenVINO, default` leaves out the precision
that the card sets, and computes in BF16 on processors that have it.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelwright.compress.int8 import (
    Int8WeightsConfig,
    TrainedGrid,
    choose_backend,
    load_int8,
    quantize_model,
    quantize_to_grid,
    save_grid_model,
    save_int8,
)
from modelwright.core.artifacts import RunDir, write_atomic
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.folder import read_kept
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.multiple_choice import NUM_CANDIDATES, Question, build_questions
from modelwright.evaluate.scoring import EvaluateConfig, MultipleChoiceConfig, Scored, sequence_nats
from modelwright.model.hf import load_model
from modelwright.ops.int_grid import WeightGrid
from modelwright.pipeline.exports import EXPORTS
from modelwright.pipeline.exports.export import ExportOptions
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.pack import model_before
from modelwright_claims.results import circumstances, machine_slug
from quickstart_runs import run

RESULTS = Path(__file__).parent / "results"
SMALL = (
    "--minutes", "0", "--stages", "clean,tokenize,pack,pretrain,sft,qat", "--data.stdlib_fraction", "0.8",
    "--sft.num_epochs", "0", "--sft.num_steps", "160", "--qat.num_steps", "80", "--qat.batch_tokens", "2048",
    "--qat.learning_rate", "1e-4", "--qat.weights", "int8", "--qat.granularity", "channel",
)  # fmt: skip
FP32, INT8, QAT, INT4 = "FP32", "INT8 after training", "INT8 trained on the grid", "INT4"
KERNELS = Int8WeightsConfig(backend="int_mm")
LENGTH_STEP = 32
"""Rows are filled up to a multiple of it, so that a runtime meets few shapes."""
CONTEXT = EvaluateConfig()
OTHERWISE = "chosen otherwise"
"""Ids of questions, with the distance between the two candidates by our own code, nats per byte."""
Logits = Callable[[np.ndarray], np.ndarray]


def write_models(source: RunDir, folder: Path) -> dict[str, Path]:
    """The model folders that are exported, by name."""
    before = source.stage(model_before(read_run_config(source.config), "qat")).artifact
    trained, tokenizer = source.stage("qat").artifact, Tokenizer.load(before)
    grid = TrainedGrid.load(trained)
    if grid is None or grid.weights.bits != 8:
        raise SystemExit(f"{source.path}: has no model that was trained on an INT8 grid; add qat with qat.weights int8")
    plain, choose = load_model(before), partial(choose_backend, KERNELS)
    four = TrainedGrid(weights=WeightGrid(bits=4, granularity="group_32"), int8_ends=True)
    folders = {name: folder / name.replace(" ", "-") for name in (INT8, QAT, INT4)}
    save_int8(quantize_model(plain, KERNELS), folders[INT8])
    save_grid_model(quantize_to_grid(load_model(trained), grid, choose=choose), grid, folders[QAT])
    save_grid_model(quantize_to_grid(plain, four, choose=choose), four, folders[INT4])
    for one in folders.values():
        tokenizer.save(one)
    return {FP32: before, **folders}


def runtimes(folder: Path, graphs: Path) -> Iterator[tuple[str, Logits]]:
    """Each program with its graph of a model."""
    found = find_model(folder)
    for name in ("onnx", "openvino"):
        EXPORTS[name].write(found, graphs / name, ExportOptions())
    onnxruntime: Any = import_module("onnxruntime")
    session = onnxruntime.InferenceSession(str(graphs / "onnx" / "model.onnx"))
    yield "ONNX Runtime", lambda ids: session.run(["logits"], {"input_ids": ids})[0]
    core: Any = import_module("openvino").Core()
    graph = core.read_model(graphs / "openvino" / "openvino_model.xml")
    for name, settings in (("OpenVINO", {"INFERENCE_PRECISION_HINT": "f32"}), ("OpenVINO, default", {})):
        compiled = core.compile_model(graph, "CPU", settings)
        yield name, lambda ids, compiled=compiled: compiled({"input_ids": ids})["logits"]


def candidates(questions: Sequence[Question], tokenizer: Tokenizer) -> list[list[Scored]]:
    """Each question with each candidate after it."""
    found: list[list[Scored]] = []
    for one in questions:
        prompt = tokenizer.chat.encode_prompt([{"role": "user", "content": one.question}])
        prompt = [*prompt, *tokenizer.encode(one.lead)]
        answers = [tokenizer.encode(f" {text}" if one.lead else text) for text in one.candidates]
        found.append([Scored([*prompt, *answer], len(prompt)) for answer in answers])
    return found


def own_nats(folder: Path, asked: Sequence[Sequence[Scored]]) -> np.ndarray:
    """[questions, candidates], as the evaluation computes them."""
    model = load_int8(folder, KERNELS) if folder.name != "artifact" else load_model(folder)
    sequences = [one for group in asked for one in group]
    settings = {name: getattr(CONTEXT, name) for name in ("context_overlap", "max_context", "batch_tokens")}
    return sequence_nats(model, sequences, **settings, progress=SilentProgress()).reshape(len(asked), -1)


def graph_nats(logits: Logits, asked: Sequence[Sequence[Scored]]) -> np.ndarray:
    """The same by a graph, the candidates of a question as the rows of one call."""
    nats = np.zeros((len(asked), NUM_CANDIDATES))
    for number, group in enumerate(asked):
        length = -(-max(len(one.ids) for one in group) // LENGTH_STEP) * LENGTH_STEP
        ids = np.array([[*one.ids, *[0] * (length - len(one.ids))] for one in group])
        for place, (one, row) in enumerate(zip(group, torch.from_numpy(logits(ids)), strict=True)):
            labels = torch.tensor(one.ids[one.first :])
            predictions = row[one.first - 1 : len(one.ids) - 1]
            nats[number, place] = torch.nn.functional.cross_entropy(predictions, labels, reduction="sum")
    return nats


def compared(own: np.ndarray, theirs: np.ndarray, questions: Sequence[Question]) -> dict[str, Any]:
    """Choices of a graph beside ours. own, theirs: nats [questions, candidates]."""
    sizes = np.array([[len(text.encode()) for text in one.candidates] for one in questions])
    answers = np.array([one.answer for one in questions])
    scores = own / sizes
    ours, chosen = scores.argmin(axis=1), (theirs / sizes).argmin(axis=1)
    others = {
        questions[place].id: float(scores[place, chosen[place]] - scores[place, ours[place]])
        for place in np.flatnonzero(chosen != ours).tolist()
    }
    return {
        "correct": int((chosen == answers).sum()),
        "correct, own": int((ours == answers).sum()),
        OTHERWISE: others,
        "largest difference of a candidate, nats": float(np.abs(own - theirs).max()),
        "mean difference of a candidate, nats": float(np.abs(own - theirs).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run, in place of a small one that the script makes")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    around, arms = circumstances(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as place:
        folder = options.run or Path(place) / "run"
        if not options.run:
            run("quickstart", "--run-dir", str(folder), *SMALL, threads=options.threads)
        models, documents = write_models(RunDir(folder), Path(place)), RunDir(folder).stage("clean").artifact
        config = MultipleChoiceConfig(num_questions=options.questions)
        questions = build_questions(read_kept(documents, split="heldout"), config)
        asked = candidates(questions, Tokenizer.load(models[FP32]))
        print(f"{len(questions)} questions\n{'model':<26}{'runtime':<19}{'correct':>8}{'own':>5}{'otherwise':>11}")
        for name, model in models.items():
            own = own_nats(model, asked)
            for runtime, logits in runtimes(model, Path(place) / f"graphs of {name}"):
                one = arms[f"{name}, {runtime}"] = compared(own, graph_nats(logits, asked), questions)
                counts = f"{one['correct']:>8}{one['correct, own']:>5}{len(one[OTHERWISE]):>11}"
                print(f"{name:<26}{runtime:<19}{counts}", flush=True)
        parameters = load_model(models[FP32]).config.num_parameters
    conditions = {"questions": len(questions), "parameters": parameters, "run": str(options.run or " ".join(SMALL))}
    record = {"benchmark": "export_scores", **conditions, **around, "arms": arms}
    path = options.results / f"export_scores-{machine_slug(around['machine'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
