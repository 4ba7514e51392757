"""Policies brought to a model: which formats its operators really compute in, read from the operators themselves."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modelwright.core.config import ConfigError, parse
from modelwright.model.attention import packed_attend
from modelwright.ops import matmul
from modelwright.ops.lowp_linear import E4M3, E5M2
from modelwright.train.precision import apply
from modelwright.train.precision.apply import ROLES, AmaxHistory, ModelPrecision, fp32_products, names_of_projections
from modelwright.train.precision.policy import POLICIES, PrecisionConfig
from modelwright.train.techniques.amax_history import SyncAmaxHistory
from tiny_decoder import make_decoder

PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}


class Formats(TorchDispatchMode):
    """Counts the operators that run, by their first input's format."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, torch.dtype]] = Counter()
        self.factors: list[torch.Tensor] = []
        self.casts: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.factors += tensors if str(func) in PRODUCTS else []
        if tensors:
            self.seen[str(func), tensors[0].dtype] += 1
        found = func(*args, **(kwargs or {}))
        if str(func) == "aten._to_copy.default" and found.dtype != tensors[0].dtype:
            self.casts[found.dtype] += 1
        return found

    def products(self) -> dict[torch.dtype, int]:
        found: Counter[torch.dtype] = Counter()
        for (name, dtype), count in self.seen.items():
            if name in PRODUCTS or "_int_mm" in name:
                found[dtype] += count
        return dict(found)

    def wide_factors(self, dtype: torch.dtype) -> int:
        """How many factors of products have values that the format does not have."""
        return sum(not torch.equal(one, one.to(dtype).to(one.dtype)) for one in self.factors)


def config(policy: str, **more) -> PrecisionConfig:
    return parse(PrecisionConfig, {"policy": policy, **more}, constants=True)


def run(model, *, backward: bool = True) -> tuple[torch.Tensor, Formats]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 96, (2, 20), generator=generator)
    positions, segments = torch.arange(20).repeat(2, 1), torch.zeros(2, 20, dtype=torch.int32)
    torch.manual_seed(1)
    with Formats() as formats:
        hidden = model(tokens, positions, packed_attend(segments))
        loss = model.cross_entropy(hidden, tokens, chunk_tokens=16) / tokens.numel()
        if backward:
            loss.backward()
    return loss.detach(), formats


@pytest.mark.parametrize(
    ("policy", "formats"),
    [
        ("fp32", {torch.float32}),
        ("bf16_mixed", {torch.bfloat16}),
        ("fp16_mixed", {torch.float16}),
        ("pure_fp16", {torch.float16}),
        ("hybrid", {torch.float32, torch.bfloat16}),
        ("int8", {torch.float32, torch.int8}),
    ],
)
def test_products_run_in_the_formats_of_the_policy(policy, formats, monkeypatch):
    """Seven projections in each of two blocks, three products each; head and loss chunk by chunk beside them. As on a
    processor that has instructions for all formats."""
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", matmul.NARROW)
    model = make_decoder()
    ModelPrecision(model, config(policy))
    _, seen = run(model)
    found = seen.products()
    assert set(found) == formats
    if policy == "int8":
        assert found[torch.int8] == 2 * 7 * 3
    if policy == "hybrid":
        assert found[torch.bfloat16] == 2 * 3 * 3
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_fp8_casts_both_factors_of_all_products_in_every_projection():
    """Gradients to E5M2, all else to E4M3, also where the product itself is computed of dequantized factors."""
    forward: dict[str, dict[torch.dtype, int]] = {}

    def watched(name, product):
        def run_watched(x, weight):
            with Formats() as seen:
                found = product(x, weight)
            forward[name] = {dtype: seen.casts[dtype] for dtype in (E4M3, E5M2)}
            return found

        return run_watched

    model = make_decoder()
    ModelPrecision(model, config("fp8")).watch(watched)
    _, seen = run(model)
    assert forward == {name: {E4M3: 2, E5M2: 0} for name in model.projections()}
    num_projections = len(forward)
    assert seen.casts[E4M3] == (2 + 1 + 1) * num_projections
    assert seen.casts[E5M2] == (1 + 1) * num_projections


@pytest.mark.parametrize(("policy", "dtype"), [("bf16_mixed", torch.bfloat16), ("pure_fp16", torch.float16)])
def test_without_instructions_fp32_products_take_factors_of_the_format(policy, dtype, monkeypatch):
    """Every factor of every product has a value of the format, and so has every result that is handed on."""
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", frozenset())
    model = make_decoder()
    ModelPrecision(model, config(policy))
    loss, seen = run(model)
    assert set(seen.products()) == {torch.float32}
    assert seen.wide_factors(dtype) == 0
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", matmul.NARROW)
    assert loss.item() == pytest.approx(run(model)[0].item(), rel=2e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_loss_is_near_that_of_fp32(policy):
    exact, model = run(make_decoder())[0], make_decoder()
    ModelPrecision(model, config(policy))
    found, _ = run(model)
    assert found.item() == pytest.approx(exact.item(), rel=0.02)
    assert (found == exact) == (policy == "fp32")


def test_the_stream_has_the_embeddings_format_and_norms_hand_on_what_is_read():
    dtypes = {}
    for policy in ("bf16_mixed", "pure_fp16", "hybrid"):
        model = make_decoder()
        ModelPrecision(model, config(policy))
        block = model.blocks["1"]
        for part in ("attention_norm", "ffn_norm"):
            getattr(block, part).register_forward_hook(
                lambda _, given, out, at=(policy, part): dtypes.update({at: (given[0].dtype, out.dtype)})
            )
        run(model)
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    assert dtypes["bf16_mixed", "attention_norm"] == dtypes["bf16_mixed", "ffn_norm"] == (fp32, bf16)
    assert dtypes["pure_fp16", "attention_norm"] == (fp16, fp16)
    assert (dtypes["hybrid", "attention_norm"], dtypes["hybrid", "ffn_norm"]) == ((fp32, fp32), (fp32, bf16))


def test_operators_leave_fp32_only_when_told_so():
    losses = {}
    for name, ops in {
        "usual": ["softmax", "reduction", "rope", "norm", "loss"],
        "norm": ["softmax", "reduction", "rope", "loss"],
        "loss": ["softmax", "reduction", "rope", "norm"],
        "activation": ["softmax", "reduction", "rope", "norm", "loss", "activation"],
    }.items():
        model = make_decoder()
        ModelPrecision(model, config("pure_fp16", fp32_ops=ops))
        losses[name], seen = run(model)
        half_softmax = ("aten.exp_.default", torch.float16) in seen.seen
        half_silu = ("aten.silu.default", torch.float16) in seen.seen
        assert half_softmax == (name == "loss")
        assert half_silu == (name != "activation")
        norms_in_half = ("aten.linalg_vector_norm.default", torch.float16) in seen.seen
        assert norms_in_half == (name == "norm")


def kept_bytes(**precision) -> int:
    """What forward keeps for backward beside the weights, each tensor's memory once."""
    model = make_decoder()
    ModelPrecision(model, config(**precision))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(model, backward=False)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)


def test_int8_keeps_less_for_backward_than_fp32():
    """Its residual stream and what products give are BF16, unless the stream is set to FP32."""
    fp32 = kept_bytes(policy="fp32")
    assert kept_bytes(policy="int8") < 0.75 * fp32
    assert kept_bytes(policy="int8", overrides={"embedding": "fp32"}) > 0.95 * fp32


def test_evaluation_in_fp32_is_that_of_a_plain_model():
    plain, model = make_decoder(), make_decoder()
    formats = ModelPrecision(model, config("int8", eval_dtype="fp32"))
    with torch.no_grad(), formats.evaluating():
        found, _ = run(model, backward=False)
    with torch.no_grad():
        exact, _ = run(plain, backward=False)
        again, _ = run(model, backward=False)
    assert found == exact
    assert again != exact


def test_parts_change_their_format_while_the_others_keep_theirs(monkeypatch):
    model = make_decoder()
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", matmul.NARROW)
    formats = ModelPrecision(model, config("fp32"))
    assert formats.parts == ["blocks.0.attention", "blocks.0.ffn", "blocks.1.attention", "blocks.1.ffn"]
    formats.change({"blocks.1.ffn": "int8", "blocks.0.attention": "bf16"})
    _, seen = run(model)
    found = seen.products()
    assert found[torch.int8] == 3 * 3
    assert found[torch.bfloat16] == 4 * 3
    formats.change(dict.fromkeys(formats.parts, "fp32"))
    assert run(model)[0] == run(make_decoder())[0]


def test_names_of_all_projections_are_the_models():
    assert set(names_of_projections(make_decoder().config)) == set(make_decoder().projections())


def test_delayed_scaling_goes_by_the_largest_of_the_last_steps():
    maxima = AmaxHistory(2)
    seen = []
    for value in (1.0, 4.0, 2.0, 1.0):
        seen.append(maxima("x", torch.tensor([[value]])).item())
        maxima.push(maxima.collect())
    assert seen == [1.0, 1.0, 4.0, 4.0]
    assert list(maxima.past["x"]) == [2.0, 1.0]
    assert not maxima.past["grad"]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_under_delayed_scaling_is_seen_and_leaves_the_past_as_it_was(value):
    """One gradient of one projection's result; the finite check looks at the weights' gradients."""
    model = make_decoder()
    formats = ModelPrecision(model, config("fp8", fp8={"scaling": "delayed"}))
    follow = SyncAmaxHistory(formats, list)
    run(model)
    follow.synchronize()
    past = follow.state_dict()["blocks.1.ffn.up_proj"]

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flatten().index_fill(0, torch.tensor(7), value).view_as(gradient)

    model.zero_grad()
    formats.begin_step()
    up_proj = model.blocks["1"].ffn.up_proj
    up_proj.register_forward_hook(lambda _, given, out: out.register_hook(overflow) and None)
    run(model)
    assert not up_proj.weight.grad.isfinite().all()
    assert not model.embedding.weight.grad.isfinite().all()
    follow.synchronize()
    after = follow.state_dict()["blocks.1.ffn.up_proj"]
    assert len(past["grad"]) == 1
    assert after["grad"] == past["grad"]
    assert len(after["x"]) == 2


def test_delayed_maxima_are_agreed_upon_and_saved():
    given = config("fp8", fp8={"scaling": "delayed", "amax_history_len": 3})
    model, other = make_decoder(), make_decoder()
    formats, others = ModelPrecision(model, given), ModelPrecision(other, given)
    run(model)
    follow = SyncAmaxHistory(formats, lambda values: [2 * value for value in values])  # another rank saw twice as much
    follow.synchronize()
    state = follow.state_dict()
    assert set(state) == set(model.projections())
    assert all(len(state[name][role]) == 1 for name in state for role in ROLES)
    SyncAmaxHistory(others, list).load_state_dict(state)
    assert others.delayed["blocks.1.ffn.up_proj"].past == formats.delayed["blocks.1.ffn.up_proj"].past
    weight = model.blocks["0"].ffn.up_proj.weight
    assert state["blocks.0.ffn.up_proj"]["weight"] == pytest.approx([2 * weight.abs().max().item()])


WHO_MULTIPLIES = """
import sys
import torch
from modelwright.train.precision.apply import fp32_products
x, weight = torch.ones(64, 256), torch.ones(128, 256, requires_grad=True)
for onednn in (False, True):
    print("by onednn" if onednn else "by default", flush=True)
    with fp32_products(onednn=onednn):
        torch.nn.functional.linear(x, weight).sum().backward()
"""


def is_refused_here() -> bool:
    try:
        with fp32_products(onednn=True):
            return False
    except ConfigError:
        return True


def test_fp32_products_by_onednn_are_its_own_and_exact():
    """oneDNN names every primitive that it runs; two of 128 x 256 with 64 rows, forward and backward."""
    if is_refused_here():
        pytest.skip("oneDNN's FP32 products are refused on this processor")
    env = {**os.environ, "DNNL_VERBOSE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WHO_MULTIPLIES], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    before, after = done.stdout.split("by onednn")
    assert "matmul" not in before
    own = [line.split(",")[-2] for line in after.splitlines() if "exec,cpu,matmul" in line]
    assert {"64x256:256x128", "128x64:64x256"} <= set(own)  # the output, the weight's gradient
    x, y = torch.randn(64, 512), torch.randn(512, 64)
    usual, precision = x @ y, torch.get_float32_matmul_precision()
    with fp32_products(onednn=True):
        torch.testing.assert_close(x @ y, usual, rtol=1e-5, atol=1e-4)
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("on_cpu", [True, False])
def test_onednn_is_refused_where_it_would_not_multiply(monkeypatch, on_cpu):
    if on_cpu:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    refused = pytest.raises(ConfigError, match=r"^precision\.fp32_matmul onednn: PyTorch does not use oneDNN")
    precision = torch.get_float32_matmul_precision()
    with refused, fp32_products(onednn=True, on_cpu=on_cpu):
        pass
    assert torch.get_float32_matmul_precision() == precision


def test_products_that_would_be_rounded_are_refused_and_nothing_stays_set(monkeypatch):
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(apply, "onednn_multiplies", lambda: True)
    monkeypatch.setattr(apply, "_products_are_exact", lambda: False)
    with pytest.raises(ConfigError, match=r"^precision\.fp32_matmul onednn: oneDNN rounds"), fp32_products(onednn=True):
        pass
    assert torch.get_float32_matmul_precision() == precision
    with fp32_products(tf32=True):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
