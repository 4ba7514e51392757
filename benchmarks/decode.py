"""Tokens per second of decoding streams, by one operator per step and by PyTorch's operators.

    python benchmarks/decode.py [--shapes quickstart,95m] [--formats fp32,int8,int4] [--streams 1,8,32] [--threads 1]
    python benchmarks/decode.py --profile    # what the operator's steps spend their time on, to benchmarks/results
    export MODELWRIGHT_ISA=avx2    # as on a processor with AVX2 alone
    env $(python -m modelwright.core.print_environment) python benchmarks/decode.py

Steps of the engine, with scheduler and sampler, greedy, after prompts of 32 tokens. All formats and both sides
alternate in every round; a side's pace is that of the median step of all rounds, in the thread's own time where there
is one thread, so that other processes disturb little. The last column is the pace of the operator over that of the
operator with FP32 weights.
"""

import argparse
import copy
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import decode_profile
from modelwright.compress.int8 import ActivationGrid, Int8WeightsConfig, TrainedGrid, quantize_model, quantize_to_grid
from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import hardware
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.ops.cpu_kernels import Kernel
from modelwright.ops.int_grid import WeightGrid
from modelwright.ops.microbenchmark import own_clock, seconds_of
from modelwright.recipes.load import recipe
from modelwright_claims import int8
from modelwright_claims.results import circumstances, machine_slug

KERNEL: Kernel = "decode_step"
SHAPES = {
    "quickstart": recipe("quickstart").model,
    "95m": int8.LARGE,
}
FORMATS = ("fp32", "bf16", "int8", "int4", "int4-codes")
"""4-bit weights meet FP32 activations, and INT8 ones."""
FOUR_BITS: dict[str, ActivationGrid] = {"int4": "none", "int4-codes": "token"}
PROMPT_LEN, WARMUP_STEPS = 32, 2


@dataclass
class Side:
    """An engine with or without the operator, and the seconds of its steps."""

    setting: str
    engine: Engine
    times: list[float] = field(default_factory=list)

    def run(self, num_streams: int, num_steps: int) -> None:
        """Decode, and keep the times of the steps."""
        with self.decoding(num_streams) as engine:
            for _ in range(num_steps):
                self.times.append(seconds_of(engine.step, "cpu", clock=own_clock("cpu")))

    @contextmanager
    def decoding(self, num_streams: int) -> Iterator[Engine]:
        """Within the block the engine decodes so many streams, whose prompts and first steps are behind it."""
        os.environ[cpu_kernels.SWITCH] = self.setting
        engine, params = self.engine, SamplingParams(max_tokens=self.engine.max_seq_len, temperature=0.0)
        for stream in range(num_streams):
            prompt = [(7 * stream + 3 * place) % engine.vocab_size for place in range(PROMPT_LEN)]
            engine.add(str(stream), prompt, params)
        while len(engine.step()) < num_streams:
            pass  # prompts, in chunks
        for _ in range(WARMUP_STEPS):
            engine.step()
        yield engine
        for stream in range(num_streams):
            engine.abort(str(stream))


def models(shape: ModelConfig, formats: list[str]) -> Iterator[tuple[str, Decoder]]:
    plain = Decoder(shape)
    plain.init_weights(0)
    for name in formats:
        if name == "int8":
            yield name, quantize_model(plain, Int8WeightsConfig())
        elif name in FOUR_BITS:
            weights = WeightGrid(bits=4, granularity="group_32")
            grid = TrainedGrid(weights=weights, activations=FOUR_BITS[name], int8_ends=True)
            yield name, quantize_to_grid(plain, grid, choose=lambda matrices: "int_mm")
        else:
            yield name, copy.deepcopy(plain).to(torch.bfloat16 if name == "bf16" else torch.float32)


def sides(model: Decoder, longest: int) -> list[Side]:
    """With the operator and without it; the other kernels are those that are used here."""
    others = cpu_kernels.used() - {KERNEL}
    config = EngineConfig(max_num_seqs=longest, kv_cache_tokens=max(16_384, 128 * longest), enable_prefix_caching=False)
    found: list[Side] = []
    with_operator: set[Kernel] = {*others, KERNEL}
    for names in (with_operator, others):
        setting = cpu_kernels.as_setting(names)[cpu_kernels.SWITCH]
        os.environ[cpu_kernels.SWITCH] = setting
        found.append(Side(setting, Engine(model.eval(), config)))
    if found[0].engine.why_no_operator:
        raise SystemExit(f"there is no operator here: {found[0].engine.why_no_operator}")
    os.environ[cpu_kernels.SWITCH] = "1"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--streams", default="1,2,8,32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="timed in each round")
    parser.add_argument("--profile", action="store_true", help="print and record what the parts of a step take")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    around, profiles = circumstances(), dict[str, Any]()
    counts = [int(one) for one in options.streams.split(",")]
    processor = f"{cpu_kernels.instruction_set()}, {hardware()['processor']}"
    print(f"{processor}, torch {torch.__version__}, {options.threads} threads")
    for shape in options.shapes.split(","):
        pairs = {name: sides(model, max(counts)) for name, model in models(SHAPES[shape], options.formats.split(","))}
        print(f"\n{shape}, {SHAPES[shape].num_parameters / 1e6:.0f} million parameters")
        if options.profile:
            profiles[shape] = profile(pairs, counts, options)
        else:
            compare(pairs, counts, options)
    if options.profile:
        settings = {"benchmark": "decode_profile", "prompt_tokens": PROMPT_LEN, "steps": options.rounds * options.steps}
        path = decode_profile.RESULTS / f"decode_profile-{machine_slug(around['machine'])}.json"
        write_atomic(path, json.dumps({**settings, **around, "microseconds": profiles}, indent=1) + "\n")
        print(path)


def profile(pairs: Mapping[str, list[Side]], counts: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """What the parts of a step take, by streams and format of the weights, microseconds."""
    print(f"microseconds of a step, share of it\n{decode_profile.header()}")
    found: dict[str, Any] = {}
    for count in counts:
        for name, (side, _) in pairs.items():
            side.run(count, options.steps)  # warms up
            steps: list[dict[str, float]] = []
            for _ in range(options.rounds):
                with side.decoding(count) as engine, decode_profile.profiled(engine) as step:
                    steps += [step() for _ in range(options.steps)]
            figures = decode_profile.row(side.engine, steps)
            found.setdefault(str(count), {})[name] = {part: round(value, 2) for part, value in figures.items()}
            print(decode_profile.line(count, name, figures), flush=True)
    return found


def compare(pairs: Mapping[str, list[Side]], counts: list[int], options: argparse.Namespace) -> None:
    """Print tokens per second with the operator and without it."""
    print(
        f"tokens per second\n{'streams':>7}  {'weights':<11}{'operator':>10}{'PyTorch':>10}{'ratio':>8}{'to FP32':>9}"
    )
    for count in counts:
        for one in (side for pair in pairs.values() for side in pair):
            one.times.clear()
        for _ in range(options.rounds):
            for pair in pairs.values():
                for side in pair:
                    side.run(count, options.steps)
        paces = {name: [count / statistics.median(side.times) for side in pair] for name, pair in pairs.items()}
        for name, (own, other) in paces.items():
            relative = f"{own / paces['fp32'][0]:>9.2f}" if "fp32" in paces else ""
            print(f"{count:>7}  {name:<11}{own:>10.0f}{other:>10.0f}{own / other:>8.2f}{relative}")


if __name__ == "__main__":
    main()
