import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.ops.cpu_kernels import speed
from modelwright.pipeline.estimate.doctor import (
    effective_rate,
    forward_products,
    measure_rates,
    recommend,
    survey,
    survey_text,
    training_products,
)
from modelwright.train.precision.policy import PrecisionConfig, resolve

MODEL = ModelConfig(
    vocab_size=128,
    num_layers=2,
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    max_seq_len=64,
)


def test_products_are_those_that_the_model_runs() -> None:
    model = Decoder(MODEL)
    model.init_weights(0)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(torch.zeros(2, 16, dtype=torch.int64), torch.arange(16).expand(2, 16), causal_attend()))
    counts = counter.get_flop_counts()["Global"]
    linears = sum(flops for op, flops in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    products = forward_products(MODEL, num_tokens=32, head_chunk_tokens=10)
    assert sum(product.flops for product in products) == pytest.approx(linears)
    trained = training_products(MODEL, num_tokens=32, head_chunk_tokens=10)
    assert sum(product.flops for product in trained) == pytest.approx(3 * linears)
    assert {product.during for product in trained} == {"forward", "grad_input", "grad_weight"}


def test_effective_rate_weighs_by_time() -> None:
    products = forward_products(MODEL, num_tokens=64, head_chunk_tokens=64)
    assert effective_rate(products, lambda m, k, n: 5.0) == pytest.approx(5.0)
    slow_head = effective_rate(products, lambda m, k, n: 1.0 if n == MODEL.vocab_size else 10.0)
    head = products[-1].flops
    total = sum(product.flops for product in products)
    assert slow_head == pytest.approx(total / (head + (total - head) / 10))


class Quiet:
    """A machine on which nothing else runs."""

    def begin(self) -> None: ...

    def seconds(self) -> float:
        return 1.0

    def other_cores(self) -> float:
        return 0.0


class Busy(Quiet):
    def other_cores(self) -> float:
        return 1e3


def test_a_slow_format_is_measured_with_fewer_tokens_and_not_recommended() -> None:
    def rate(m: int, k: int, n: int, dtype: torch.dtype) -> float:
        return 1e9 if dtype == torch.float32 else 1e6

    training = measure_rates(MODEL, num_tokens=4096, budget_s=1.5, rate=rate, others=Quiet())
    assert training["tokens"]["fp32"] == 4096
    assert 64 <= training["tokens"]["bf16"] < 4096
    assert training["effective"] == pytest.approx({"fp32": 1e9, "bf16": 1e6})
    assert recommend(training, {})["compute"] == "fp32"
    assert resolve(PrecisionConfig(), training["effective"]).compute == "fp32"


def test_several_threads_on_a_busy_machine_are_taken_for_as_many_times_one() -> None:
    def rate(m: int, k: int, n: int, dtype: torch.dtype) -> float:
        """Threads without a core each wait for each other."""
        alone = 2e9 if dtype == torch.bfloat16 else 1e9
        return alone if torch.get_num_threads() == 1 else 1e6

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    training = measure_rates(MODEL, num_tokens=64, budget_s=1.0, rate=rate, others=Busy())
    torch.set_num_threads(before)
    assert training["effective"] == pytest.approx({"fp32": 2e9, "bf16": 4e9})
    assert training["busy_cores"] > 0
    assert (training["threads"], training["measured_threads"]) == (2, 1)


def test_survey_of_this_machine(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    facts = survey(MODEL, num_tokens=64, folder=tmp_path / "not" / "there", budget_s=0.2)
    torch.set_num_threads(before)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["machine"]["disk_free_bytes"] > 0
    assert 0 < facts["machine"]["memory_available_bytes"] <= facts["machine"]["memory_bytes"]
    assert all(value > 0 for value in facts["training"]["effective"].values())
    facts["training"]["busy_cores"] = 1.75
    assert "note: other processes use 1.8 of" in survey_text(facts)
    facts["training"]["busy_cores"] = 0.0
    text = survey_text(facts)
    assert "other processes" not in text
    assert facts["kernels"]["used"] == sorted(cpu_kernels.used())
    facts["kernels"] = {"instruction_set": "avx2", "used": ["norm"], "rows": speed()["avx2"]["rows"]}
    (line,) = [line for line in survey_text(facts).splitlines() if line.startswith("norm  ") and "64, bf16" in line]
    assert line.endswith("  yes")
    facts["kernels"] = {"instruction_set": "avx2", "used": ["norm", "attention"], "rows": speed()["avx2"]["rows"][-1:]}
    assert "used without a measurement: attention, norm" in survey_text(facts)
    facts["kernels"] = {"instruction_set": "neon", "used": [], "rows": []}
    assert "own kernels on neon: none, not measured (benchmarks/kernel_speed.py --write)" in survey_text(facts)
    for word in ("processor", "gate_proj grad_weight", "effective", "recommended compute", "1 thread,", "(1 thread;"):
        assert word in text
