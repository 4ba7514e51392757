"""Fine-tuning and alignment on Modelwright, on TRL, and on TRL with PEFT, side by side: `make bench`.

    python benchmarks/tuning_peers.py --trl PYTHON --trl-ppo PYTHON [--quick] [--sizes NAME ...] [--compute NAME ...]
        [--only CASE ...] [--repeats N] [--threads N] [--results FOLDER]
    python benchmarks/tuning_peers.py --show FILE

Peers have interpreters of their own, with torch of the same version: `--trl` one with `pip install trl peft`,
`--trl-ppo` one with `pip install 'trl==1.12.*' peft`, the last TRL that has PPO. `make bench` makes both.

Same Llama of random weights, same texts, as many tokens (sft, lora), pairs (dpo) or completions (grpo, ppo) in an
update, same optimizer settings, same threads, no gradient checkpointing. Each run is a process of its own; tuners take
turns (A B A B ...), and figures are medians. Supervised fine-tuning has three forms in TRL: each is tried once, and the
fastest one is repeated and compared with. That the losses are the same is what `trl_losses.py` shows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import num_usable_cores
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import save_model, save_sequence_classifier
from modelwright.ops.matmul import is_emulated
from modelwright_claims.results import circumstances, machine_slug
from tuners.task import EOS, PAD, SEED, VOCABULARY, Case, Task

RESULTS = Path(__file__).parent / "results"
WORKER = Path(__file__).parent / "tuners" / "work.py"
OWN = "Modelwright"
SFT_FORMS = ("TRL, packed", "TRL, padding-free", "TRL, padded")
PEERS: Mapping[Case, tuple[str, ...]] = {
    "sft": SFT_FORMS, "lora": SFT_FORMS, "dpo": ("TRL",), "grpo": ("TRL",), "ppo": ("TRL 1.12",),
}  # fmt: skip
UNITS: Mapping[Case, Literal["samples", "tokens"]] = {
    "sft": "tokens", "lora": "tokens", "dpo": "samples", "grpo": "samples", "ppo": "samples",
}  # fmt: skip
HEAD = "score"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, what of it an update learns from, and how much faster than its peers Modelwright is meant to be."""

    model_dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tasks: Mapping[Case, Mapping[str, int]]
    targets: Mapping[Case, float]
    repeats: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=VOCABULARY,
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.model_dim // self.num_heads,
            ffn_dim=self.ffn_dim,
            max_seq_len=1024,
            qk_norm=False,
            tie_embeddings=False,
        )


SMALL_TASKS: Mapping[Case, Mapping[str, int]] = {
    "sft": {"batch": 4, "num_updates": 5, "num_warmup": 1},
    "lora": {"batch": 4, "num_updates": 5, "num_warmup": 1},
    "dpo": {"batch": 8, "num_updates": 5, "num_warmup": 1},
    "grpo": {"batch": 16, "num_updates": 4, "num_warmup": 1},
    "ppo": {"batch": 16, "num_updates": 3, "num_warmup": 1},
}
LARGE_TASKS: Mapping[Case, Mapping[str, int]] = {
    "sft": {"batch": 2, "num_updates": 3, "num_warmup": 1},
    "lora": {"batch": 2, "num_updates": 3, "num_warmup": 1},
    "dpo": {"batch": 4, "num_updates": 3, "num_warmup": 1},
    "grpo": {"batch": 8, "num_updates": 3, "num_warmup": 1, "completion_len": 32},
    "ppo": {"batch": 8, "num_updates": 2, "num_warmup": 1, "completion_len": 32},
}
SIZES = {
    "8.6M": Size(
        model_dim=256, ffn_dim=704, num_layers=6, num_heads=4, num_kv_heads=2, tasks=SMALL_TASKS, repeats=3,
        targets={"sft": 5.0, "lora": 3.0, "dpo": 3.0, "grpo": 3.0, "ppo": 3.0},
    ),
    "95M": Size(
        model_dim=768, ffn_dim=2304, num_layers=12, num_heads=12, num_kv_heads=4, tasks=LARGE_TASKS, repeats=2,
        targets={"sft": 5.0, "lora": 3.0, "dpo": 2.0, "grpo": 2.0, "ppo": 2.0},
    ),
}  # fmt: skip
QUICK = {"num_updates": 2, "num_warmup": 1}


def main() -> None:
    options = parse()
    if options.show:
        print_record(json.loads(options.show.read_text(encoding="utf-8")))
        return
    started, around = time.perf_counter(), circumstances()
    record: dict[str, Any] = {
        "benchmark": "tuning_peers", "quick": options.quick, "models": {}, "rows": [], **around,
        "threads": options.threads,
    }  # fmt: skip
    slug = machine_slug(around["machine"])
    path = options.results / f"tuning-peers-{slug}{'-quick' if options.quick else ''}.json"
    for name in options.sizes:
        with tempfile.TemporaryDirectory(prefix="modelwright-bench-") as folder:
            record["models"][name] = write_models(Path(folder), SIZES[name])
            for compute in options.compute:
                for case in options.only:
                    record["rows"].append(measure(Path(folder), name, compute, case, options))
                    record["wall_s"] = time.perf_counter() - started
                    save(record, path)
    print_record(record)
    print(f"written to {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="interpreter of an environment with trl and peft")
    parser.add_argument("--trl-ppo", type=Path, help="interpreter of an environment with trl 1.12")
    parser.add_argument("--quick", action="store_true", help="the small model in FP32, one timed update, one repeat")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=[])
    parser.add_argument(
        "--compute",
        nargs="+",
        choices=("fp32", "bf16"),
        default=[],
        help="default: bf16 where the processor has instructions for it, otherwise fp32",
    )
    parser.add_argument("--only", nargs="+", choices=get_args(Case), default=list(get_args(Case)))
    parser.add_argument("--repeats", type=int, default=0, help="runs of each tuner; 0: as many as suit the size")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--show", type=Path, help="print the verdicts of a record, without measuring")
    options = parser.parse_args()
    options.sizes = options.sizes or (["8.6M"] if options.quick else list(SIZES))
    is_bf16 = not options.quick and not is_emulated(torch.bfloat16, torch.device("cpu"))
    options.compute = options.compute or ["bf16" if is_bf16 else "fp32"]
    if not options.show:
        check_interpreters(parser, options)
    return options


def check_interpreters(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error unless the peers that are asked for are there."""
    needed = {
        "--trl": (options.trl, "peft", {"sft", "lora", "dpo", "grpo"}),
        "--trl-ppo": (options.trl_ppo, "trl/experimental/ppo", {"ppo"}),
    }
    for option, (python, package, cases) in needed.items():
        if not cases.intersection(options.only):
            continue
        if python is None:
            parser.error(f"{option}: is missing; give an interpreter with its packages, or choose cases with --only")
        look = "import os, sys; sys.exit(not any(os.path.isdir(os.path.join(one, sys.argv[1])) for one in sys.path))"
        try:
            found = not subprocess.run([python, "-c", look, package]).returncode
        except OSError as error:
            parser.error(f"{option}: {python} cannot be run ({error})")
        if not found:
            parser.error(f"{option}: {python} has no {package}; see the head of this file for what to install")


def write_models(folder: Path, size: Size) -> dict[str, Any]:
    """The policy and the reward model, with random weights; returns what the record says of the model."""
    policy, judge = Decoder(size.config), Decoder(replace(size.config, tie_embeddings=True))
    for number, model in enumerate((policy, judge)):
        model.init_weights(SEED + number)
    judge.heads[HEAD] = torch.nn.Linear(size.model_dim, 1, bias=False)
    save_model(policy, folder / "model", eos_id=EOS, pad_id=PAD)
    save_sequence_classifier(judge, folder / "reward", head=HEAD, label="reward", eos_id=EOS, pad_id=PAD)
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    return {"num_parameters": size.config.num_parameters, "config": config}


def measure(folder: Path, size: str, compute: Any, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One row: all tuners once, then Modelwright and the fastest peer in turn."""
    chosen, unit = SIZES[size], UNITS[case]
    changes = {**chosen.tasks[case], **(QUICK if options.quick else {})}
    task = Task(folder=folder, case=case, compute=compute, threads=options.threads, **changes)
    file = folder / f"{case}-{compute}.json"
    task.save(file)
    repeats = options.repeats or (1 if options.quick else chosen.repeats)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (OWN, *PEERS[case])}
    turns = list(runs)
    for repeat in range(repeats):
        for name in turns:
            runs[name].append(run_once(file, name, interpreter(name, options), folder / "out"))
            rate = runs[name][-1][f"{unit}_per_s"]
            print(f"{size} {compute} {case}, {repeat + 1}/{repeats} {name}: {rate:,.1f} {unit}/s", flush=True)
        turns = [OWN, fastest(runs, unit)]
    summary = {name: summarize(of) for name, of in runs.items()}
    peer, key = fastest(runs, unit), f"{unit}_per_s"
    ratio, target = summary[OWN][key] / summary[peer][key], chosen.targets[case]
    return {
        "case": case, "size": size, "compute": compute, "unit": unit, "peer": peer, "ratio": ratio, "target": target,
        "verdict": "met" if ratio >= target else "short", "task": {**vars(task), "folder": ""}, "summary": summary,
        "runs": runs,
    }  # fmt: skip


def interpreter(name: str, options: argparse.Namespace) -> str:
    """The Python that has a tuner."""
    if name == OWN:
        return sys.executable
    return str(options.trl_ppo if name in PEERS["ppo"] else options.trl)


def run_once(task: Path, name: str, python: str, out: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    threads = str(json.loads(task.read_text(encoding="utf-8"))["threads"])
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        command = [python, str(WORKER), str(task), name, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        environment["TRL_EXPERIMENTAL_SILENCE"] = "1"
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads((Path(folder) / "measured.json").read_text(encoding="utf-8"))


def fastest(runs: Mapping[str, Sequence[Mapping[str, Any]]], unit: str) -> str:
    """The peer with the highest median rate."""
    peers = [name for name in runs if name != OWN]
    return max(peers, key=lambda name: statistics.median(run[f"{unit}_per_s"] for run in runs[name]))


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the repeats, and the spread of the speed as (max - min) / median."""
    keys = [key for key, value in runs[0].items() if isinstance(value, float | int)]
    summary = {key: statistics.median(run[key] for run in runs) for key in keys}
    speeds = [run["tokens_per_s"] for run in runs]
    return summary | {"spread": (max(speeds) - min(speeds)) / summary["tokens_per_s"]}


def print_record(record: Mapping[str, Any]) -> None:
    """A line for every tuner, and the verdicts."""
    machine = record["machine"]
    print(f"\n{machine['processor']}, {machine['instruction_set']}, {record['threads']} threads, {record['commit']}")
    for remark in record.get("remarks", []):
        print(f"remark: {remark}")
    print(f"{'size':6}{'':6}{'case':6}{'tuner':19}{'samples/s':>11}{'tokens/s':>11}{'spread':>8}{'ours is':>9}", end="")
    print(f"{'per CPU s':>11}{'peak MiB':>10}{'above start':>13}{'first loss':>12}  verdict")
    for row in record["rows"]:
        own, key = row["summary"][OWN], row["unit"]
        for name, of in row["summary"].items():
            ratio, per_cpu_s = (own[f"{key}_per_{time}"] / of[f"{key}_per_{time}"] for time in ("s", "cpu_s"))
            verdict = f"{row['verdict']} (at least {row['target']:g}x)" if name == row["peer"] else ""
            print(
                f"{row['size']:6}{row['compute']:6}{row['case']:6}{name:19}{of['samples_per_s']:11,.2f}"
                f"{of['tokens_per_s']:11,.0f}{of['spread']:8.1%}{ratio:8.2f}x{per_cpu_s:10.2f}x"
                f"{of['peak_bytes'] / 2**20:10,.0f}{of['peak_bytes_above_start'] / 2**20:13,.0f}"
                f"{of['first_loss']:12.5f}  {verdict}"
            )
    met = sum(row["verdict"] == "met" for row in record["rows"])
    print(f"{met} of {len(record['rows'])} targets met; {record['wall_s'] / 60:.1f} minutes")


def save(record: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
