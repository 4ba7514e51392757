"""Modelwright against an earlier commit of itself, in turn: no task is to become slower or to need more memory.

    python benchmarks/versus.py COMMIT [--only WORD ...] [--repeats N] [--results FOLDER]
    python benchmarks/versus.py --show FILE

COMMIT is checked out into a temporary worktree, and both run with this interpreter and its packages. Each run is a
process of its own; a round runs both sides, every second round in the other order. A task is *slower* (or *larger*)
where the bound of the mean of the paired ratios lies on the wrong side of 1 by more than `TOLERANCE`. Training, tuning,
serving and cleaning are the programs of each checkout. Decoding is the same program for both, and its two processes
take turns of at most a few seconds: the speed of a machine that is shared changes within minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

ENVIRONMENT = dict(os.environ)
"""As it was before anything of Modelwright was imported, which sets variables."""
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOW, BEFORE = "now", "before"
TOLERANCE = 0.02
"""Slower by less than this says nothing about the code: where functions come to lie in memory moves as much."""
STREAMS = (1, 8, 32)
PROMPT_LEN, NUM_STEPS = 256, 64
NUM_TURNS = 8
"""How often each side measures each task of decoding in a round."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "4.8M": {
        "vocab_size": 8192, "num_layers": 4, "model_dim": 192, "num_heads": 4, "num_kv_heads": 2, "head_dim": 48,
        "ffn_dim": 512, "max_seq_len": 512,
    },
    "94M": {
        "vocab_size": 12_288, "num_layers": 12, "model_dim": 768, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64,
        "ffn_dim": 2048, "max_seq_len": 512,
    },
}  # fmt: skip
"""Those of the recipe quickstart and of the claim int8; written down, so that both sides have the same ones."""
FORMATS = ("fp32", "int8", "int4-codes")

Measured = Mapping[str, Mapping[str, float]]
"""By task: its `speed`, of which more is better, and the peak of its resident memory, `peak_bytes`, where known."""
Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""The same with one or more measurements of each figure."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="what to compare with")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--show", type=Path, help="print a record, without measuring")
    parser.add_argument("--decode", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write-models", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        decode_here(options.decode)
    elif options.write_models:
        from tuning_peers import SIZES, write_models

        write_models(Path(options.write_models[0]), SIZES[options.write_models[1]])
    elif options.show:
        print("\n".join(table(json.loads(options.show.read_text(encoding="utf-8")))))
    elif not options.commit:
        parser.error("COMMIT: name the commit to compare with")
    else:
        record, path = compare(options)
        print("\n".join(table(record)))
        print(f"written to {path}")


def compare(options: argparse.Namespace) -> tuple[Mapping[str, Any], Path]:
    from modelwright.core.artifacts import write_atomic
    from modelwright_claims.results import circumstances, machine_slug

    around, started, samples = circumstances(), time.perf_counter(), dict[str, dict[str, dict[str, list[float]]]]()
    only = "" if list(options.only) == list(TASKS) else f"-{'-'.join(options.only)}"
    path = options.results / f"versus-{options.commit[:8]}{only}-{machine_slug(around['machine'])}.json"
    with worktree(options.commit) as before, tempfile.TemporaryDirectory(prefix="modelwright-bench-") as scratch:
        sides = {NOW: ROOT, BEFORE: before}
        for number in range(options.repeats):
            for name in options.only:
                turn = {side: sides[side] for side in list(sides)[:: 1 if number % 2 == 0 else -1]}
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    for side, found in TASKS[name](turn, Path(folder)):
                        for task, figures in found.items():
                            for figure, values in figures.items():
                                samples.setdefault(task, {}).setdefault(figure, {}).setdefault(side, []).extend(values)
                            speed = f"{statistics.median(figures['speed']):,.5g}"
                            print(f"{number + 1}/{options.repeats} {side:6} {task}: {speed}", flush=True)
                # After each task, so that one that fails in a later round does not take the others with it.
                wall_s = time.perf_counter() - started
                record = {"benchmark": "versus", "commit_before": options.commit, "repeats": number + 1, **around}
                record |= {"samples": samples, "wall_s": wall_s}
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, json.dumps(record, indent=1) + "\n")
    return record, path


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """A line for each task: medians of both sides and the verdict."""
    from modelwright_claims.statistics import ratios

    yield f"{record['machine']['instruction_set']}, now {record['commit']}, before {record['commit_before'][:8]}"
    yield f"{'task':42}{'before':>10}{'now':>10}{'ratio':>7}{'bounds':>15}  {'MiB before':>10}{'now':>7}"
    for task, figures in record["samples"].items():
        speed = figures["speed"]
        ratio = ratios(speed[NOW], speed[BEFORE])
        line = f"{task:42}{statistics.median(speed[BEFORE]):10,.4g}{statistics.median(speed[NOW]):10,.4g}"
        line += f"{ratio.mean:7.2f}   [{ratio.lower:.2f}, {ratio.upper:.2f}]"
        verdicts = ["slower"] if ratio.upper < 1 - TOLERANCE else []
        if "peak_bytes" in figures:
            peaks = figures["peak_bytes"]
            line += "  " + "".join(f"{statistics.median(peaks[side]) / 2**20:10,.0f}" for side in (BEFORE, NOW))
            verdicts += ["larger"] if ratios(peaks[NOW], peaks[BEFORE]).lower > 1 + TOLERANCE else []
        yield f"{line}  {' and '.join(verdicts)}"


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="modelwright-before-") as name:
        folder = Path(name) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            for project in project_files(folder):
                declare_entry_points(project)
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def project_files(checkout: Path) -> list[Path]:
    """Returns the `pyproject.toml` of each package next to the main one, in the layouts of all commits."""
    return [*checkout.glob("*/pyproject.toml"), *checkout.glob("packages/*/pyproject.toml")]


def declare_entry_points(project: Path) -> None:
    """Write the metadata that an installed package has next to its sources. The path leads there before the installed
    packages of this environment, whose entry points may name what this commit does not have.
    """
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    folder = project.parent / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    folder.mkdir()
    name_and_version = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (folder / "METADATA").write_text(name_and_version, encoding="utf-8")
    lines: list[str] = []
    for group, entries in about.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def environment_of(checkout: Path, folder: Path) -> Mapping[str, str]:
    """Returns the variables that lead to the packages of a checkout, and those that the checkout itself sets for
    programs: without that, both sides would have those of this process.
    """
    from modelwright.core.resources import num_usable_cores

    packages = [one.parent for one in project_files(checkout)]
    threads = {name: str(num_usable_cores()) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (checkout / "src", *packages)))}
    environment = {**ENVIRONMENT, **threads, **paths}
    own = [sys.executable, "-m", "modelwright.core.print_environment"]
    printed = subprocess.run(own, env=environment, cwd=folder, capture_output=True, text=True, check=True).stdout
    return environment | dict(word.split("=", 1) for word in printed.split())


def run(checkout: Path, *words: str | Path, folder: Path) -> None:
    """Run a program with the packages of a checkout."""
    command, environment = [sys.executable, *map(str, words)], environment_of(checkout, folder)
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")


def compute_formats() -> Sequence[Literal["fp32", "bf16"]]:
    """Return FP32, and after it BF16 where the processor has instructions for it: the last is the fastest."""
    import torch

    from modelwright.ops.matmul import is_emulated

    return ("fp32",) if is_emulated(torch.bfloat16, torch.device("cpu")) else ("fp32", "bf16")


def pretraining(checkout: Path, folder: Path) -> Measured:
    found = dict[str, Mapping[str, float]]()
    for compute in compute_formats():
        out, program = folder / compute, checkout / "benchmarks" / "peers.py"
        words = ("--only", "Modelwright", "--repeats", "1", "--compute", compute, "--results", out)
        run(checkout, program, *words, folder=folder)
        (record,) = (json.loads(file.read_text(encoding="utf-8")) for file in out.glob("*.json"))
        of = record["summary"]["Modelwright"]
        found[f"pretraining, {compute.upper()}, {size_of(record['model'])}"] = {
            "speed": of["tokens_per_s"],
            "peak_bytes": of["peak_bytes"],
        }
    return found


def size_of(hf_config: Mapping[str, Any]) -> str:
    """Returns the number of a model's parameters in millions: "4.8M"."""
    from modelwright.model.hf import config_from_hf

    return f"{config_from_hf(hf_config).num_parameters / 1e6:.1f}M"


def tuning(checkout: Path, folder: Path) -> Measured:
    from modelwright.core.resources import num_usable_cores
    from tuners.task import Task
    from tuning_peers import SIZES, UNITS

    found, compute = dict[str, Mapping[str, float]](), compute_formats()[-1]
    for name, size in SIZES.items():
        models = folder / name
        # In a process of its own: the peak that a process is said to have begins with that of the one that started it.
        run(ROOT, Path(__file__), "--write-models", models, name, folder=folder)
        for case, changes in size.tasks.items():
            out, file = models / case, models / f"{case}.json"
            out.mkdir()
            Task(folder=models, case=case, compute=compute, threads=num_usable_cores(), **changes).save(file)
            run(checkout, checkout / "benchmarks/tuners/work.py", file, "Modelwright", out, folder=folder)
            measured = json.loads((out / "measured.json").read_text(encoding="utf-8"))
            speed = {"speed": measured[f"{UNITS[case]}_per_s"], "peak_bytes": measured["peak_bytes"]}
            found[f"{case.upper()}, {compute.upper()}, {name}"] = speed
    return found


def decoding(checkouts: Mapping[str, Path], folder: Path) -> Iterator[tuple[str, Samples]]:
    """Starts a process for each side; at any time one of them works and the other waits."""
    with ExitStack() as stack:
        ask = {side: stack.enter_context(decoder(checkout, folder)) for side, checkout in checkouts.items()}
        while True:
            names = {ask_side("next") for ask_side in ask.values()}
            if len(names) > 1:
                raise SystemExit(f"the two commits decode different things: {' and '.join(sorted(names))}")
            (name,) = names
            if not name:
                return
            speeds: dict[str, list[float]] = {side: [] for side in ask}
            for turn in range(NUM_TURNS):
                for side in list(ask)[:: 1 if turn % 2 == 0 else -1]:
                    speeds[side].append(ask[side]("again"))
            yield from ((side, {name: {"speed": values}}) for side, values in speeds.items())


@contextmanager
def decoder(checkout: Path, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Starts `decode_here` of a checkout; yields what sends it a word and returns its answer."""
    command = [sys.executable, str(Path(__file__)), "--decode", str(checkout)]
    with (
        tempfile.TemporaryFile("w+", dir=folder, errors="replace") as messages,
        subprocess.Popen(
            command, env=environment_of(checkout, folder), cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages,
        ) as process,
    ):  # fmt: skip

        def ask(word: str) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # the missing answer says it
                process.stdin.write(f"{word}\n")
                process.stdin.flush()
            if answer := process.stdout.readline():
                return json.loads(answer)
            messages.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{messages.read()[-3000:]}")

        try:
            yield ask
        finally:
            process.kill()


def decode_here(checkout: Path) -> None:
    """Answers the word "next" with the name of a further task, "" after the last, and "again" with the speed at it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries write is no answer
    tasks = decoding_tasks(checkout)
    measure: Callable[[], float] = float  # which returns 0.0: there is no task yet, nor after the last
    for word in sys.stdin:
        if word.strip() == "next":
            answer, measure = next(tasks, ("", float))
            measure()  # warms up
        else:
            answer = statistics.median(measure() for _ in range(3))
        print(json.dumps(answer), file=answers, flush=True)


def decoding_tasks(checkout: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    """The engine of the checkout, in this process: its own decoder and formats, the shapes of this file."""
    sys.path.insert(0, str(checkout / "benchmarks"))
    import torch

    import decode

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for shape, fields in SHAPES.items():
        for name, model in decode.models(decode.ModelConfig(**fields, tie_embeddings=False), list(FORMATS)):
            config = decode.EngineConfig(max_num_seqs=32, kv_cache_tokens=32 * 512, enable_prefix_caching=False)
            engine = decode.Engine(model.eval(), config)
            for streams in STREAMS if shape == "4.8M" else STREAMS[:1]:
                run_streams = partial(_decoded, engine, streams, decode.SamplingParams)
                yield f"decode, {name}, {shape}, {streams} streams", run_streams
            yield f"prompt, {name}, {shape}", partial(_read, engine, decode.SamplingParams)


def _decoded(engine: Any, streams: int, params: Any) -> float:
    """Tokens per second of so many streams, after their prompts."""
    for stream in range(streams):
        prompt = [(7 * stream + 3 * place) % engine.vocab_size for place in range(32)]
        engine.add(str(stream), prompt, params(max_tokens=400, temperature=0.0))
    while len(engine.step()) < streams:
        pass
    started = time.perf_counter()
    num_tokens = sum(len(engine.step()) for _ in range(NUM_STEPS))
    seconds = time.perf_counter() - started
    for stream in range(streams):
        engine.abort(str(stream))
    return num_tokens / seconds


def _read(engine: Any, params: Any) -> float:
    """Tokens per second of a prompt, up to its first token."""
    prompt = [3 + 7 * place % 251 for place in range(PROMPT_LEN)]
    engine.add("one", prompt, params(max_tokens=2, temperature=0.0))
    started = time.perf_counter()
    while not engine.step():
        pass
    seconds = time.perf_counter() - started
    engine.abort("one")
    return PROMPT_LEN / seconds


def serving(checkout: Path, folder: Path) -> Measured:
    """The short form of the claim; its largest rate is in requests per second."""
    run(checkout, "-m", "modelwright.cli.main", "prove", "serving_qps", "--quick", "--results", folder, folder=folder)
    (file,) = folder.glob("serving_qps*.json")
    samples = json.loads(file.read_text(encoding="utf-8"))["samples"]
    (rate,) = (values for name, values in samples.items() if name.startswith("largest rate, ours INT8, Poisson"))
    return {"requests, INT8, 4.8M": {"speed": statistics.median(rate)}}


def cleaning(checkout: Path, folder: Path) -> Measured:
    """Documents per CPU-second beyond the start: the difference between two sizes, both large enough for workers."""
    words = ("--sizes", "16000", "48000", "--folder", folder, "--results", folder / "out")
    run(checkout, checkout / "benchmarks" / "clean_scale.py", *words, folder=folder)
    (file,) = (folder / "out").glob("*.json")
    small, large = json.loads(file.read_text(encoding="utf-8"))["runs"]
    speed = (large["documents"] - small["documents"]) / (large["cpu_s"] - small["cpu_s"])
    return {"cleaning, all default steps": {"speed": speed, "peak_bytes": large["rss"]}}


def one_after_other(
    measure: Callable[[Path, Path], Measured], checkouts: Mapping[str, Path], folder: Path
) -> Iterator[tuple[str, Samples]]:
    for side, checkout in checkouts.items():
        place = folder / side
        place.mkdir()
        found = measure(checkout, place)
        yield side, {task: {figure: [value] for figure, value in of.items()} for task, of in found.items()}


TASKS: Mapping[str, Callable[[Mapping[str, Path], Path], Iterator[tuple[str, Samples]]]] = {
    "pretraining": partial(one_after_other, pretraining),
    "tuning": partial(one_after_other, tuning),
    "decoding": decoding,
    "serving": partial(one_after_other, serving),
    "cleaning": partial(one_after_other, cleaning),
}
"""What is compared, in this order; each is given the checkout of each side and an empty folder."""


if __name__ == "__main__":
    main()
