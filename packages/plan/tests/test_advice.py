"""The needs of a step against their formulas, its times, what they advise, and gains quoted from stored results."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelwright.cli.config import setting_names
from modelwright.cli.main import main
from modelwright.core.artifacts import RunDir, save_yaml
from modelwright.data.rows.cache.row_cache import RowCacheConfig
from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.strategies.config import AsyncUpdatesConfig, GradientSyncConfig
from modelwright.pipeline.estimate.cost import ASSUMED_TRAIN_MFU
from modelwright.pipeline.estimate.probes.probe import ProbeResult
from modelwright.pipeline.estimate.probes.survey import NAMES, MachineProbes
from modelwright.recipes.load import recipe
from modelwright.train.config import TrainConfig
from modelwright.train.memory.activations import ActivationCheckpointingConfig
from modelwright.train.precision.policy import PrecisionConfig
from modelwright_claims.ledger import CLAIMS
from modelwright_plan.advice.needs import StepNeeds, Transport, step_needs, step_times
from modelwright_plan.advice.run_advice import (
    advice_data,
    expected_gain,
    limit_lines,
    read_ledger,
    technique_lines,
    usual_processes,
)
from modelwright_plan.advice.techniques import SWITCHES, Situation, TechniqueSwitch, advise
from modelwright_plan.commands.advice import refusal_of
from refusals import config_error

ROOT = Path(__file__).parents[3]
SAMPLE = Path(__file__).parent / "sample_ledger"
HERE = "Sample CPU, AVX512"
MODEL = ModelConfig(
    vocab_size=128, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=64, max_seq_len=64
)
WEIGHTS = 4 * MODEL.num_parameters
TRAINING = TrainConfig(
    num_steps=10,
    batch_tokens=512,
    precision=PrecisionConfig(policy="fp32"),
    checkpoint_every_minutes=0.0,
    checkpoint_every_steps=100,
)
FIGURES = {
    "memory": {"all_threads_bytes_per_s": 1e10},
    "disk": {"write_bytes_per_s": 1e8, "read_bytes_per_s": 2e8, "reads_per_s": 1e4, "fsync_p50_s": 0.01},
    "loopback": {"latency_s": 2e-5, "bytes_per_s": 2e9},
    "gloo": {"latency_s": 1e-4, "bytes_per_s": 5e8},
}
RATES = {"fp32": 1e9, "bf16": 0.9e9}


def probes_of(figures: dict[str, dict[str, float]]) -> MachineProbes:
    return MachineProbes(
        results={name: ProbeResult(state="measured", figures=values) for name, values in figures.items()}
    )


def needs_of(training: TrainConfig = TRAINING, *, num_processes: int = 2, **layout: Any) -> StepNeeds:
    parallel = ParallelConfig(**layout)
    return step_needs(MODEL, training, parallel, num_processes=num_processes, seq_len=64, fused=False)


def situation_of(
    training: TrainConfig = TRAINING,
    *,
    figures: dict[str, dict[str, float]] | None = None,
    rates: dict[str, float] | None = None,
    available_bytes: float = 1e12,
    num_processes: int = 2,
    transport: Transport = "gloo",
    cache: RowCacheConfig | None = None,
    rows_at: str = "",
    **changes: Any,
) -> Situation:
    needs = replace(needs_of(training, num_processes=num_processes), **changes)
    probes, rates = probes_of(figures or FIGURES), rates or RATES
    return Situation(
        training=training,
        parallel=ParallelConfig(),
        cache=cache or RowCacheConfig(),
        rows_at=rows_at,
        needs=needs,
        times=step_times(needs, probes, flops_per_s=rates["fp32"], transport=transport),
        rates=rates,
        available_bytes=available_bytes,
        on_cpu=True,
    )


def actions(situation: Situation) -> dict[str, str]:
    advice = advise(situation, SWITCHES, lambda settings: "", stage="pretrain")
    return {one.switch.name: one.action for one in advice if one.action != "not now"}


def test_needs_are_their_formulas() -> None:
    needs = needs_of(num_processes=4)
    assert needs.flops == pytest.approx(3 * 512 * MODEL.flops_per_token(16.0))
    assert needs.weight_bytes == 4 * WEIGHTS * 4  # in each of four processes
    assert needs.optimizer_bytes == 7 * WEIGHTS * 4
    assert needs.link_bytes == pytest.approx(1.5 * WEIGHTS)
    assert needs.link_messages == 6
    assert (needs.row_bytes, needs.row_reads) == (2 * 512, 512 / 64)
    assert needs.checkpoint_bytes == 3 * WEIGHTS
    twice = needs_of(replace(TRAINING, gradient_accumulation_steps=2))
    assert twice.weight_bytes == 2 * needs_of().weight_bytes
    assert twice.activation_bytes == needs_of().activation_bytes
    alone = needs_of(num_processes=1)
    assert (alone.link_bytes, alone.link_messages) == (0, 0)


def test_needs_follow_the_layout_and_the_settings() -> None:
    sharded = needs_of(num_processes=4, zero_stage=3)
    assert sharded.optimizer_bytes == 7 * WEIGHTS
    assert sharded.peak_bytes < needs_of(num_processes=4).peak_bytes
    assert sharded.link_bytes > needs_of(num_processes=4).link_bytes
    tensor = needs_of(num_processes=2, tensor=2)
    assert tensor.weight_bytes == needs_of(num_processes=1).weight_bytes
    again = needs_of(
        replace(TRAINING, activation_checkpointing=ActivationCheckpointingConfig(mode="full", layers_per_segment=1))
    )
    assert again.flops > needs_of().flops
    assert again.activation_bytes < needs_of().activation_bytes
    assert again.peak_bytes < again.peak_without_checkpointing_bytes == needs_of().peak_bytes
    assert needs_of(replace(TRAINING, optimizer="sgd")).checkpoint_bytes == WEIGHTS
    with config_error("data", match="start"):
        needs_of(num_processes=3, tensor=2)
    with config_error("batch_tokens", match="batch_tokens"):
        needs_of(num_processes=3)


def test_times_are_needs_over_rates() -> None:
    needs = needs_of()
    times = step_times(needs, probes_of(FIGURES), flops_per_s=1e9, transport="gloo")
    assert times.seconds["compute"] == pytest.approx(needs.flops / (1e9 * ASSUMED_TRAIN_MFU))
    assert times.seconds["communication"] == pytest.approx(WEIGHTS / 5e8 + 1e-4)
    assert times.seconds["memory"] == pytest.approx(needs.memory_bytes / 1e10)
    assert times.checkpoint_s == pytest.approx(3 * WEIGHTS / 1e8 + 0.01)
    assert times.row_s == pytest.approx(8 / 1e4)  # rows of 128 bytes: one read of a block each
    assert times.seconds["disk"] == pytest.approx(times.checkpoint_s / 100 + times.row_s)
    assert times.bottleneck == "compute"
    assert sum(times.share(one) for one in times.seconds) == pytest.approx(1)
    shared = step_times(needs, probes_of(FIGURES), flops_per_s=1e9, transport="shared memory")
    assert shared.seconds["communication"] == pytest.approx(4 * WEIGHTS / 1e10)
    by_time = replace(needs, checkpoint_every_steps=0, checkpoint_every_s=50.0)
    disk = step_times(by_time, probes_of(FIGURES), flops_per_s=1e9, transport="gloo").seconds["disk"]
    assert disk == pytest.approx(times.checkpoint_s * times.seconds["compute"] / 50 + times.row_s)
    long = replace(needs, row_bytes=8 * 20_000.0)
    long_s = step_times(long, probes_of(FIGURES), flops_per_s=1e9, transport="gloo").row_s
    assert long_s == pytest.approx(8 / 1e4 + 8 * (20_000 - 4096) / 2e8)


def test_shuffled_rows_cost_reads_and_not_bytes() -> None:
    """A disk whose heads move: fast in sequence, slow from place to place."""
    slow = {**FIGURES, "disk": {**FIGURES["disk"], "read_bytes_per_s": 1e12, "reads_per_s": 100.0}}
    times = step_times(needs_of(), probes_of(slow), flops_per_s=1e9, transport="gloo")
    assert times.row_s == pytest.approx(8 / 100)
    assert times.share("disk") > 10 * step_times(
        needs_of(), probes_of(FIGURES), flops_per_s=1e9, transport="gloo"
    ).share("disk")
    unknown = {**FIGURES, "disk": {name: FIGURES["disk"][name] for name in ("write_bytes_per_s", "fsync_p50_s")}}
    assert step_times(needs_of(), probes_of(unknown), flops_per_s=1e9, transport="gloo").row_s == 0.0


def test_bare_tcp_stands_beside_gloo_and_in_its_place_where_it_was_not_measured() -> None:
    needs = needs_of()
    tcp_s = needs.link_bytes / 2e9 + needs.link_messages * 2e-5
    times = step_times(needs, probes_of(FIGURES), flops_per_s=1e9, transport="gloo")
    assert times.tcp_s == pytest.approx(tcp_s)
    assert times.seconds["communication"] > times.tcp_s
    (line,) = (line for line in limit_lines(needs, times) if line.strip().startswith("communication"))
    assert line.endswith(f", through gloo; bare TCP over loopback would take {tcp_s:.4f} s")
    alone = {name: values for name, values in FIGURES.items() if name != "gloo"}
    bare = step_times(needs, probes_of(alone), flops_per_s=1e9, transport="gloo")
    assert bare.seconds["communication"] == pytest.approx(tcp_s)
    assert bare.latency_s == pytest.approx(needs.link_messages * 2e-5)
    for transport in ("none", "shared memory", "NCCL"):
        assert step_times(needs, probes_of(FIGURES), flops_per_s=1e9, transport=transport).tcp_s == 0.0


def test_what_was_not_measured_is_not_judged() -> None:
    times = step_times(needs_of(), probes_of({}), flops_per_s=1e9, transport="gloo")
    assert list(times.seconds) == ["compute"]
    assert times.ratio.endswith("= 1 : ? : ? : ?")
    lines = limit_lines(needs_of(), times)
    assert sum("not measured" in line for line in lines) == 3


MEASURED = {
    ("memory", "all_threads_bytes_per_s"): {"memory"},
    ("gloo", "latency_s"): {"communication"},
    ("gloo", "bytes_per_s"): {"communication"},
    ("disk", "write_bytes_per_s"): {"disk"},
    ("disk", "read_bytes_per_s"): {"disk"},
    ("disk", "reads_per_s"): {"disk"},
    ("disk", "fsync_p50_s"): {"disk"},
}


@pytest.mark.parametrize(("probe", "figure"), list(MEASURED))
def test_one_figure_changes_its_own_lines_and_no_other(probe: str, figure: str) -> None:
    """The line of its resource, the ratio, and the share of the bottleneck."""
    figures = {**FIGURES, "disk": {**FIGURES["disk"], "fsync_p50_s": 5.0}}  # so that each shows in what is printed
    other = {name: dict(values) for name, values in figures.items()}
    other[probe][figure] *= 1 / 3 if figure.endswith("_per_s") else 3
    needs = replace(
        needs_of(),
        checkpoint_bytes=1e9,
        row_bytes=1e9,
        row_reads=1e4,
        link_messages=1e3,
        link_bytes=3e7,
        weight_bytes=1e9,
    )
    before, after = (
        limit_lines(needs, step_times(needs, probes_of(one), flops_per_s=1e8, transport="gloo"))
        for one in (figures, other)
    )
    changed = {number for number, (line, new) in enumerate(zip(before, after, strict=True)) if line != new}
    resource, ratio, bottleneck = (changed & {1, 2, 3, 4}, changed & {5}, changed & {6})
    assert {before[number].split()[0] for number in resource} == MEASURED[probe, figure]
    assert ratio
    assert changed == resource | ratio | bottleneck
    assert before[5].split()[:2] == ["compute", ":"]


def test_the_rate_of_products_changes_compute_only() -> None:
    needs = needs_of()
    before, after = (
        step_times(needs, probes_of(FIGURES), flops_per_s=rate, transport="gloo").seconds for rate in (1e9, 2e9)
    )
    assert {one for one in before if before[one] != after[one]} == {"compute"}


def test_advice_follows_what_limits() -> None:
    assert actions(situation_of()) == {}
    assert actions(situation_of(rates={"fp32": 1e9, "bf16": 3e9})) == {"BF16 products": "switch on"}
    slow_link = {**FIGURES, "gloo": {"latency_s": 1e-4, "bytes_per_s": 1e5}}
    assert actions(situation_of(figures=slow_link)) == {
        "compressed gradients": "switch on", "local SGD with INT8": "switch on", "Hogwild": "switch on",
    }  # fmt: skip
    late = {**FIGURES, "gloo": {"latency_s": 1.0, "bytes_per_s": 1e9}}
    several = situation_of(figures=late, num_processes=4)
    assert actions(several)["all-reduces chosen by the topology"] == "switch on"
    through_memory = situation_of(figures={"memory": {"all_threads_bytes_per_s": 1e5}}, transport="shared memory")
    assert "compressed gradients" not in actions(through_memory)
    assert actions(situation_of(optimizer_bytes=1e12)) == {"sparse updates": "switch on"}
    assert actions(situation_of(available_bytes=1.0)) == {
        "activation checkpointing": "switch on", "ZeRO": "switch on",
    }  # fmt: skip
    assert "ZeRO" not in actions(situation_of(available_bytes=1.0, num_processes=1))
    heads = {**FIGURES, "disk": {**FIGURES["disk"], "reads_per_s": 100.0}}
    assert actions(situation_of(figures=heads)) == {"row cache": "switch on"}
    assert actions(situation_of(figures=heads, cache=RowCacheConfig(enabled=True))) == {"row cache": "keep"}
    assert actions(situation_of(cache=RowCacheConfig(enabled=True))) == {"row cache": "keep"}
    assert actions(situation_of(rows_at="s3://bucket/run")) == {"row cache": "switch on"}


def test_what_nothing_asks_for_is_switched_off() -> None:
    costly = replace(
        TRAINING,
        precision=PrecisionConfig(policy="bf16_mixed"),
        activation_checkpointing=ActivationCheckpointingConfig(mode="full"),
        gradient_sync=GradientSyncConfig(kind="powersgd"),
    )
    assert actions(situation_of(costly)) == {
        "BF16 products": "switch off", "activation checkpointing": "switch off", "compressed gradients": "switch off",
    }  # fmt: skip
    hogwild = replace(TRAINING, async_updates=AsyncUpdatesConfig(mode="hogwild"))
    assert actions(situation_of(hogwild, link_bytes=0.0, link_messages=0.0)) == {"Hogwild": "switch off"}
    needed = situation_of(costly, rates={"fp32": 1e9, "bf16": 3e9}, available_bytes=1.0, link_bytes=1e8)
    assert set(actions(needed).values()) == {"keep", "switch on"}


def test_options_are_exact_and_exist() -> None:
    everything = situation_of(
        rates={"fp32": 1e9, "bf16": 3e9}, available_bytes=1.0, optimizer_bytes=2e9, link_bytes=5e7,
        link_messages=4e3, num_processes=4, row_reads=3e3,
    )  # fmt: skip
    advice = advise(everything, SWITCHES, lambda settings: "", stage="pretrain")
    assert [one.action for one in advice] == ["switch on"] * len(SWITCHES)
    assert advice[0].option == "--pretrain.precision.policy bf16_mixed"
    settings = {word.removeprefix("--") for one in advice for word in one.option.split() if word.startswith("--")} | {
        setting.partition("=")[0] for switch in SWITCHES for setting in (*switch.on, *switch.off)
    }
    assert settings <= set(setting_names())


def test_a_setting_that_the_run_would_refuse_is_not_advised() -> None:
    asked: list[list[str]] = []

    def refusal(settings) -> str:
        asked.append(list(settings))
        return "precision.policy: does not go with this run"

    situation = situation_of(rates={"fp32": 1e9, "bf16": 3e9})
    advice = advise(situation, SWITCHES, refusal, stage="pretrain")
    assert asked == [["pretrain.precision.policy=bf16_mixed"]]
    assert advice[0].action == "impossible here"
    assert advice[0].reason.endswith("but precision.policy: does not go with this run")


def test_a_technique_from_outside() -> None:
    mine = TechniqueSwitch(
        name="mine", on=["training.compile=true"], off=["training.compile=false"],
        is_on=lambda now: now.training.compile is True, reason=lambda now: "because", claims=["mine"],
    )  # fmt: skip
    advice = advise(situation_of(), [*SWITCHES, mine], lambda settings: "", stage="pretrain")[-1]
    assert (advice.action, advice.option) == ("switch on", "--pretrain.compile true")
    assert expected_gain(advice, [], here=HERE)[0] == "unknown"


def test_the_ledger_is_read_without_what_is_no_measurement() -> None:
    rows = read_ledger(SAMPLE)
    assert [(row.claim, row.verdict, row.machine) for row in rows] == [
        ("bf16_mixed", "met", HERE), ("bf16_mixed", "short", "Sample CPU, AVX2"),
        ("hogwild", "short", "Sample CPU, AVX2"),
    ]  # fmt: skip
    assert read_ledger(SAMPLE / "nowhere") == []


def test_gains_are_expected_by_the_ledger_only() -> None:
    situation = situation_of(rates={"fp32": 1e9, "bf16": 3e9}, link_bytes=1e8)
    advice = advise(situation, SWITCHES, lambda settings: "", stage="pretrain")
    ledger = read_ledger(SAMPLE)
    lines = technique_lines(advice, ledger, here=HERE)
    first = lines.index("switch on: BF16 products  --pretrain.precision.policy bf16_mixed")
    assert lines[first + 2] == (  # the result of another kind of processor, which was short, does not count
        "  expected gain: likely; on this kind of processor: bf16_mixed met (2026-11-20, bf16_mixed-alike.json)"
    )
    hogwild = next(number for number, line in enumerate(lines) if line.startswith("try: Hogwild"))
    assert lines[hogwild].endswith("(instead of: compressed gradients, local SGD with INT8)")
    assert lines[hogwild + 2].startswith("  expected gain: DOUBTFUL; on ANOTHER KIND OF PROCESSOR: hogwild short (")
    data = advice_data(situation.needs, situation.times, advice, ledger, here=HERE)
    gains = {one["name"]: one["expected_gain"] for one in data["techniques"]}
    assert (gains["BF16 products"], gains["Hogwild"], gains["ZeRO"]) == ("likely", "DOUBTFUL", "unknown")
    json.dumps(data)


def test_every_claim_that_is_named_exists() -> None:
    assert {claim for switch in SWITCHES for claim in switch.claims} <= {claim.name for claim in CLAIMS}
    measured = {row.claim for row in read_ledger(ROOT / "benchmarks" / "results")}
    assert {"bf16_mixed", "zero_memory"} <= measured


FEW = ["--seconds", "0.02", "--skip", "loopback", "gloo"]


def test_the_command_on_a_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run").create()
    run.write_info({"invocations": [{"world_size": 4}], "stages": {}})
    save_yaml(run.config, recipe("tiny"))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "advice", str(run.path), *FEW, "--json", "--interruptions-per-hour", "0.5"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["probes"]["results"]) == set(NAMES)
    assert data["needs"]["num_processes"] == 4  # as the run had
    assert data["times"]["bottleneck"] in data["times"]["seconds"]
    assert {rule["name"] for rule in data["rules"] if rule["applies"]} >= {"young", "daly"}
    assert {one["action"] for one in data["techniques"]} <= {
        "switch on", "switch off", "keep", "impossible here", "not now"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--nproc", "-1"], "--nproc: must be at least 1"),
        (["tiny", "--nproc", "7"], "batch_tokens: "),
        (["tiny", "--skip", "rates"], "--skip: advice for a training needs rates"),
        (["tiny", "--seconds", "0"], "--seconds: must be above 0"),
        (["tiny", "--interruptions-per-hour", "-1"], "--interruptions-per-hour: must not be negative"),
    ],
)
def test_words_that_the_command_refuses(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plan", "advice", *words]) == 2
    assert message in capsys.readouterr().err


def test_processes_that_a_layout_needs(tmp_path: Path) -> None:
    parallel = recipe("tiny").parallel
    assert usual_processes(tmp_path, parallel) == 2
    assert refusal_of("tiny", ["pretrain.precision.policy=bf16_mixed"], 2) == ""
    assert refusal_of("quickstart", ["pretrain.async_updates.mode=hogwild"], 2)  # its optimizer needs whole gradients
