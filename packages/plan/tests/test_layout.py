"""Times of layouts, the search over them, and the command."""

import json
from dataclasses import replace

import pytest

from modelwright.cli.main import main
from modelwright.core.artifacts import save_yaml
from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, expected_traffic
from modelwright.recipes.load import load
from modelwright.train.memory.activations import ActivationCheckpointingConfig
from modelwright_plan.catalog import DEVICES, MODELS
from modelwright_plan.commands.plan import number
from modelwright_plan.format_layouts import proposal_data, proposal_text
from modelwright_plan.layout_search import MARGIN, Cluster, assess, layouts, propose
from modelwright_plan.measured import MeasuredError, error_text, measured_errors
from modelwright_plan.step_time import ComputeRate
from refusals import config_error

pytestmark = pytest.mark.slow

MODEL = ModelConfig(
    vocab_size=32_000, num_layers=16, model_dim=2048, num_heads=16, num_kv_heads=8, head_dim=128, ffn_dim=5632,
    max_seq_len=2048,
)  # fmt: skip
JOB = TrainingJob(model=MODEL, seq_len=2048, batch_tokens=64 * 2048)


def cluster(num_hosts: int = 2, devices_per_host: int = 4, memory: float = 80e9, **changes) -> Cluster:
    card = DEVICES["h100"]
    rates = {"host_bytes_per_s": card.host_bytes_per_s, "network_bytes_per_s": card.network_bytes_per_s} | changes
    return Cluster(
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        memory_bytes=memory,
        compute=card.rate("bf16", name="h100"),
        **rates,
    )


@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(zero_stage=3, context=2)])
def test_placement_is_told_the_traffic_that_the_assessment_charges(parallel):
    host = cluster(num_hosts=1, devices_per_host=8)
    slow = replace(
        host, compute=replace(host.compute, peak_flops_per_s=1.0), device="cpu"
    )  # nothing hides under compute
    layout = Layout(parallel=parallel, num_devices=8, microbatch_rows=2, activations=ActivationCheckpointingConfig())
    found = expected_traffic(JOB, layout)
    charged = assess(JOB, layout, slow).communication_s
    assert set(found) == set(charged)
    for axis, one in found.items():
        seconds = one.num_messages * (one.num_bytes / host.host_bytes_per_s + host.host_latency_s)
        assert seconds == pytest.approx(charged[axis])


def test_the_bubble_of_zero_bubble_follows_from_the_number_of_microbatches():
    """Two stages on each of 4 ranks: as simulated, 20% with 4 microbatches and 6% with 8 where all parts are equal."""
    equal = ComputeRate(peak_flops_per_s=1e12, product_share=0.5, attention_share=1.0, source="")
    no_head = replace(MODEL, vocab_size=8, tie_embeddings=False)
    shares = []
    for rows in (4, 8, 16):
        job = TrainingJob(model=no_head, seq_len=32, batch_tokens=rows * 32)
        parallel = ParallelConfig(pipeline=4, schedule="zero_bubble", stages_per_rank=2)
        layout = Layout(
            parallel=parallel, num_devices=4, microbatch_rows=1, activations=ActivationCheckpointingConfig()
        )
        shares.append(assess(job, layout, replace(cluster(num_hosts=1), compute=equal)).bubble_share)
    assert shares == pytest.approx([3 / 15, 1.5 / 25.5, 1.5 / 49.5], rel=0.05)


def test_stages_are_those_of_training():
    """The head counts as layers; a V-shaped schedule has two stages on each rank."""
    wide = replace(MODEL, vocab_size=256_000)
    job = replace(JOB, model=wide)
    layout = Layout(
        parallel=ParallelConfig(pipeline=4),
        num_devices=4,
        microbatch_rows=1,
        activations=ActivationCheckpointingConfig(),
    )
    layers = assess(job, layout, cluster(num_hosts=1)).layers_per_stage
    assert sum(layers) == 16
    assert layers[-1] < layers[0]
    v_shaped = replace(layout, parallel=ParallelConfig(pipeline=4, schedule="zero_bubble", stages_per_rank=2))
    assert len(assess(job, v_shaped, cluster(num_hosts=1)).layers_per_stage) == 8


def test_the_slowest_and_the_fullest_rank_may_be_in_the_middle():
    """Unevenly many layers: no layout computes faster than blocks are assumed to."""
    parallel = ParallelConfig(pipeline=4, layers_per_stage=(3, 6, 5, 2))
    layout = Layout(parallel=parallel, num_devices=4, microbatch_rows=1, activations=ActivationCheckpointingConfig())
    even = replace(layout, parallel=ParallelConfig(pipeline=4, layers_per_stage=(4, 4, 4, 4)))
    uneven, plain = (assess(JOB, one, cluster(num_hosts=1)) for one in (layout, even))
    assert uneven.compute_s > 1.1 * plain.compute_s, "six layers against four and the head"
    assert uneven.memory.total > plain.memory.total
    for found in propose(JOB, cluster(num_hosts=1)).fitting:
        assert found.utilization(cluster(num_hosts=1)) < cluster().compute.product_share


def assessed(devices: int = 8, rows: int = 1, activations: ActivationCheckpointingConfig | None = None, **parallel):
    layout = Layout(
        parallel=ParallelConfig(**parallel),
        num_devices=devices,
        microbatch_rows=rows,
        activations=activations or ActivationCheckpointingConfig(),
    )
    return assess(JOB, layout, cluster())


def test_time_by_part():
    plain, tensor, across = assessed(), assessed(tensor=4), assessed(tensor=8)
    assert plain.communication_s.keys() == {"replicate"}
    assert tensor.communication_s.keys() == {"tensor", "replicate"}
    # 7/8 of the stream at 4 x 50 GB/s into each host, against 3/4 at 450 GB/s, and three times as many messages.
    ratio = across.communication_s["tensor"] / tensor.communication_s["tensor"]
    assert 7 / 8 / 200 / (3 / 4 / 450) < ratio < 8, "the network is the slower link"
    # Narrower products are slower: each rank reads the whole input.
    assert plain.compute_s < tensor.compute_s < 1.2 * plain.compute_s
    piped = assessed(pipeline=4)
    assert piped.bubble_s > plain.bubble_s == 0
    again = assessed(activations=ActivationCheckpointingConfig(mode="full", layers_per_segment=1))
    assert 0.2 < again.recompute_s / again.compute_s < 1 / 3
    assert again.memory.total < plain.memory.total
    assert plain.step_s == pytest.approx(plain.compute_s + plain.optimizer_s + sum(plain.communication_s.values()))


def test_proposals_fit_are_sorted_and_the_rest_have_reasons():
    small = cluster(memory=12e9)
    proposal = propose(JOB, small)
    assert proposal.fitting
    assert proposal.too_large
    assert all(found.memory.total <= MARGIN * 12e9 for found in proposal.fitting)
    assert all(found.memory.total > MARGIN * 12e9 for found in proposal.too_large)
    steps = [found.step_s for found in proposal.fitting]
    assert steps == sorted(steps), "the fastest first"
    text = proposal_text(JOB, small, proposal, top=3, known_error="")
    for words in ("fastest 3", "meshes do not fit", "GB on its fullest device", "has not been measured here"):
        assert words in text
    data = proposal_data(JOB, small, proposal)
    assert len(data["fitting"]) == len(proposal.fitting)
    assert data["fitting"][0]["total_bytes"] == 8 * proposal.fitting[0].memory.total
    tiny = cluster(memory=5e8)
    nothing = proposal_text(JOB, tiny, propose(JOB, tiny), top=3, known_error="x: 3% off")
    assert "no layout fits" in nothing
    assert "its states alone" in nothing
    assert "x: 3% off" in nothing


def test_a_proposed_layout_is_one_that_training_accepts():
    """Devices, rows and heads divide; stage counts match."""
    seen = 0
    for layout in layouts(JOB, cluster()):
        sizes = layout.axes
        assert sizes["pipeline"] * sizes["replicate"] * sizes["shard"] * sizes["context"] * sizes["tensor"] == 8
        assert JOB.num_rows % (layout.copies * layout.microbatch_rows) == 0
        seen += 1
    assert seen > 100


def test_a_batch_that_nothing_divides_is_refused():
    with config_error("hosts"):
        propose(TrainingJob(model=MODEL, seq_len=2048, batch_tokens=2048), cluster(num_hosts=3, devices_per_host=1))


def test_gpt3_needs_terabytes_and_the_command_says_so(capsys):
    assert MODELS["gpt3-175b"].num_parameters == pytest.approx(175e9, rel=0.005)
    words = "plan layout gpt3-175b --hosts 1 --devices-per-host 8 --device h100 --batch-tokens 131072 --top 1"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "2.79 TB in all" in printed
    assert "no layout fits" in printed
    assert "its states alone" in printed


def planned(capsys, words: str) -> dict:
    assert main(["plan", "layout", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_published_tokens_per_second_of_llama_8b_are_predicted(capsys):
    """torchtitan, Llama 3.1 8B with FSDP on 8 H100 of 2.4 TB/s: 6,667 tokens/s on each. Those here have 3.35 TB/s."""
    plan = planned(capsys, "llama3.1-8b --devices-per-host 8 --device h100 --batch-tokens 131072")
    assert plan["job"]["model"]["num_layers"] == 32
    tokens_per_s = [131072 / 8 / found["step_s"] for found in plan["fitting"] if found["parallel"]["zero_stage"] == 3]
    assert 6667 < max(tokens_per_s) < 1.15 * 6667


def test_every_format_has_the_rate_of_the_device(capsys):
    words = "llama2-7b --batch-tokens 8192 --device "
    peaks = {}
    for given in ("h100 --compute bf16", "h100 --compute fp32", "h100 --compute tf32", "a100", "v100", "h100"):
        plan = planned(capsys, words + given)
        peaks[given] = plan["cluster"]["compute"]["peak_flops_per_s"] / 1e12, plan["job"]["compute"]
    assert peaks == {
        "h100 --compute bf16": (989, "bf16"),
        "h100 --compute fp32": (67, "fp32"),
        "h100 --compute tf32": (495, "tf32"),
        "a100": (312, "bf16"),
        "v100": (125, "fp16"),
        "h100": (989, "bf16"),
    }


def test_a_device_without_bf16_is_planned_in_fp16_and_the_note_says_so(capsys):
    words = ["plan", "layout", "llama2-7b", "--device", "v100", "--batch-tokens", "8192"]
    assert main(words) == 0
    assert "v100 has no products in BF16: planned in FP16" in capsys.readouterr().out
    assert main([*words, "--compute", "bf16"]) == 2
    assert "--compute: v100 does not support BF16; it supports fp32, fp16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "device", "expected"),
    [
        ("auto", "h100", "bf16"),
        ("auto", "v100", "fp32"),
        ("int8", "h100", "fp32"),
        ("fp8", "h100", "fp8"),
        ("fp32", "a100", "fp32"),
    ],
)
def test_a_recipe_is_planned_in_its_own_format(capsys, tmp_path, policy, device, expected):
    file = tmp_path / "recipe.yaml"
    save_yaml(file, load("quickstart", {"pretrain": {"precision": {"policy": policy}}}).config)
    assert planned(capsys, f"{file} --device {device}")["job"]["compute"] == expected


def test_the_shares_of_the_peak_are_shown_with_their_source_and_can_be_set(capsys):
    words = ["plan", "layout", "llama2-7b", "--device", "h100", "--batch-tokens", "8192"]
    assert main([*words]) == 0
    printed = capsys.readouterr().out
    assert "BF16, 989 TFLOP/s at the peak of a device; products reach 63% of it, attention 21%: fitted on" in printed
    assert "Interruptions: one in" in printed
    assert main([*words, "--efficiency", "0.16"]) == 0
    slower = capsys.readouterr().out
    assert "products reach 16% of it, attention 16%: given with --efficiency" in slower
    assert main([*words, "--efficiency", "40"]) == 2
    assert "--efficiency: must be above 0 and at most 1, got 40.0" in capsys.readouterr().err


def test_one_share_for_all_work_is_flops_over_the_rate(capsys):
    """Without a rate of the memory nothing else takes time: attention's backward pass apart, the share is the MFU."""
    plan = planned(
        capsys, "llama2-7b --device h100 --batch-tokens 8192 --device-memory 1TB --efficiency 0.5 --seq-len 512"
    )
    best = plan["fitting"][0]
    assert best["optimizer_s"] == 0
    assert 0.49 < best["utilization"] < 0.5


def test_a_recipe_is_planned_on_links_that_are_given(capsys):
    words = ["plan", "layout", "quickstart", "--devices-per-host", "2", "--device-memory", "8GiB", "--flops", "1e11"]
    assert main([*words]) == 2
    assert "--host-bandwidth: give it" in capsys.readouterr().err
    links = ["--host-bandwidth", "1GB/s", "--network-bandwidth", "100M"]
    assert main([*words, *links, "--json"]) == 0
    assert '"process"' in capsys.readouterr().out, "a CPU's ranks are processes with memory of their own"


def test_sizes_with_units():
    for text, value in (("80GB", 80e9), ("64GiB", 64 * 2**30), ("9.5e14", 9.5e14), ("900M", 9e8), ("1GB/s", 1e9)):
        assert number(text, "--memory") == value
    for text in ("", "-3", "0", "3 apples"):
        with config_error("memory"):
            number(text, "--memory")


def test_the_measured_error_comes_with_the_plan(capsys):
    assert main(["plan", "layout", "llama2-7b", "--device", "h100", "--batch-tokens", "8192"]) == 0
    errors = measured_errors()
    assert errors
    assert f"memory: {error_text(errors)}\n" in capsys.readouterr().out


def test_the_text_of_measured_errors():
    error = MeasuredError(claim="zero_memory", processor="P", date="d", num_predictions=2, max_error_percent=6.04)
    assert error_text([error]) == "zero_memory: at most 6.0% off over 2 measurements (P, d)"
    assert error_text([]) == ""


def test_tokens_of_a_batch_take_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "layout", "llama2-7b", "--device", "h100", "--devices-per-host", "8", "--top", "1"]
    assert main([*words, "--batch-tokens", "2M", "--seq-len", "4Ki"]) == 0
    assert "rows of 4096, 1,998,848 tokens an update" in capsys.readouterr().out  # 488 rows
    assert main([*words, "--batch-tokens", "2Mi"]) == 0
    assert f"{2**21:,} tokens an update" in capsys.readouterr().out
    for given, message in (
        ("2000000", "must be a multiple of a row's 4096 tokens, got 2000000"),
        ("2MB", "'2MB' is not a whole number; write 4096, 4Ki or 2M"),
        ("-4096", "must be a multiple of a row's 4096 tokens, got -4096"),
    ):
        assert main([*words, "--batch-tokens", given]) == 2
        assert f"--batch-tokens: {message}" in capsys.readouterr().err
