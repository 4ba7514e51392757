"""Claim: dynamic gated attention computes 35% less attention at 98% of the quality.

The method is learned selection of heads (`model/head_selection.py`). It is compared with usual ways to the same
saving: fewer heads from the start, heads that are pruned half-way (by contribution), and a sliding window in three of
four layers. All read as many tokens, each at its own best rate, chosen on a seed and a split of their own.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from modelwright.compress.prune import input_moments, prune
from modelwright.data.rows.batch import TokenBatch
from modelwright.infer.decode_operator import decode_operator
from modelwright.infer.kv_cache import PagedCache
from modelwright.infer.model_runner import ModelRunner
from modelwright.infer.products import stable_row_multiple
from modelwright.infer.scheduler import Chunk, SchedulerOutput
from modelwright.infer.sequence import SamplingParams
from modelwright.infer.sequence import Sequence as EngineSequence
from modelwright.model.adapter_bank import AdapterSet
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Attend, Block, Decoder, Linear, ModelConfig
from modelwright.model.head_selection import decisions_seen
from modelwright.ops.microbenchmark import in_turn
from modelwright.ops.tensor_heap import use_tensor_heap
from modelwright.train.objective import forward
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.experiment import Runner, Tuning, best_value, tune, with_value
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.statistics import Estimate, differences, percent_above, ratios
from modelwright_claims.training_run import ONE_THREAD, Outcome, Processes, Run, execute, heldout_batches
from modelwright_claims.workbench import VOCAB_SIZE, Size, packed_rows, prepare_text

PLAIN, METHOD = "all heads", "dynamic heads"
FEWER, PRUNED, WINDOW = "fewer heads", "pruned heads", "sliding window"
RIVALS = (FEWER, PRUNED, WINDOW)
TARGET_COMPUTE = 0.65
SIZE = Size(model_dim=128, num_layers=4, seq_len=1024, batch_rows=2, num_steps=300)
"""Rows are this long so that documents are long as well: with short ones attention is mostly copying keys and values.
"""
NUM_HEADS = 8
CHANGED = (
    "before any training, after timing untrained models: the budget from 0.6 to 0.5, rows from 512 tokens to 1,024, "
    "windows from every other layer to three of four; after a record of three seeds, whose FLOPs left out projections, "
    "the budget to 0.4, 600 steps to 300, rates halved, six other seeds"
)
"""Settings that were chosen again once the time of attention was known."""
SHAPE = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_HEADS, "head_dim": 16}
BUDGET = 0.4
"""Below the target: projections are computed for all heads, and gathering and routers cost time that FLOPs
of attention do not show.
"""
NUM_STATIC = 5
"""The maximum number of heads within the target. A static choice costs no time, so it may use the rest of the target.
"""
RATES = (1e-3, 2e-3, 4e-3)
TUNING_SEED, SEEDS = 400, (411, 412, 413, 414, 415, 416)
WINDOW_STEP = 8
CALIBRATION_BATCHES = 2
NUM_ROUNDS, STREAMS, BLOCK_LEN, CPU = 15, 8, 16, torch.device("cpu")
OWN, OPEN, CLOSED = "own", "open", "closed"
"""Routers of a model that decodes: as trained; and such that all heads are open, or none is."""


@dataclass
class Bench:
    """Makes the runs of all arms. at_once: runs at the same time."""

    setting: Setting
    size: Size = SIZE
    rates: Sequence[float] = RATES
    seeds: Sequence[int] = SEEDS
    processes: Processes = ONE_THREAD
    at_once: int = 2
    num_rounds: int = NUM_ROUNDS

    def arms(self) -> dict[str, Run]:
        """Every arm reads as many tokens. Pruned heads: the first half of the steps with all of them."""
        plain = Run(size=self.size, model=SHAPE, processes=self.processes)
        middle = self.rates[len(self.rates) // 2]
        half = replace(plain, size=replace(self.size, num_steps=self.size.num_steps // 2, learning_rate=middle))
        static = {**SHAPE, "num_heads": NUM_STATIC, "num_kv_heads": NUM_STATIC}
        windows = {"window": self.window(), "window_layers": self.window_layers()}
        return {
            PLAIN: plain,
            METHOD: replace(plain, model={**SHAPE, "head_budget": BUDGET}),
            FEWER: replace(plain, model=static),
            PRUNED: replace(half, model=static, start_from=half),
            WINDOW: replace(plain, model={**SHAPE, "attention": windows}),
        }

    def window(self) -> int:
        """The longest window that leaves as much of scores and values as the budget of heads does, on training rows."""
        rows = packed_rows(self.setting, seq_len=self.size.seq_len, mode="best_fit", split="train")
        contexts = torch.cat([_contexts(batch) for batch in islice(rows.batches(8), 8)]).double()
        windowed = len(self.window_layers()) / self.size.num_layers
        fits = [
            window
            for window in range(WINDOW_STEP, self.size.seq_len, WINDOW_STEP)
            if 1 - windowed + windowed * contexts.clamp(max=window).mean() / contexts.mean() <= BUDGET
        ]
        return max(fits, default=WINDOW_STEP)

    def window_layers(self) -> list[int]:
        """All but every fourth layer."""
        return [layer for layer in range(self.size.num_layers) if (layer + 1) % 4]

    def compare(self) -> "Comparison":
        """Tune each arm, then run it for each seed at its best rate and measure its attention."""
        runner, arms = Runner(self.setting, execute_arm), self.arms()
        tuned = tune(runner, arms, Tuning(values=self.rates, seeds=(TUNING_SEED,)), at_once=self.at_once)
        rates = {name: best_value(losses) for name, losses in tuned.items()}
        final = {
            name: [of_seed(with_value(run, "learning_rate", rates[name]), seed) for seed in self.seeds]
            for name, run in arms.items()
        }
        runner.keep([run for runs in final.values() for run in runs], at_once=self.at_once)
        costs = {name: [] for name in arms}
        decoding: list[Mapping[str, float]] = []
        for number in range(len(self.seeds)):
            models = {name: self.model(runner, runs[number]) for name, runs in final.items()}
            for name, cost in self.costs(models).items():
                costs[name].append(cost)
            decoding.append(self.decoding(models[METHOD]))
        outcomes = {name: [runner.outcome(run) for run in runs] for name, runs in final.items()}
        return Comparison(rates=rates, window=self.window(), final=outcomes, costs=costs, decoding=decoding)

    def model(self, runner: Runner, run: Run) -> Decoder:
        model = Decoder(run.model_config(prepare_text(self.setting).vocab_size))
        load_model(model, runner.weights(run))
        return model.eval()

    def batches(self) -> list[TokenBatch]:
        return heldout_batches(self.setting, Run(size=self.size, heldout_batches=1))

    def costs(self, models: Mapping[str, Decoder]) -> dict[str, "Cost"]:
        """FLOPs and seconds of attention of one held-out batch in each model; the timed calls alternate."""
        batches = self.batches()
        part = batches[0].take(torch.arange(self.size.batch_rows))
        use_tensor_heap()
        with one_thread():
            timers = {name: partial(own_seconds, attention_call(model, part)) for name, model in models.items()}
            times = in_turn(timers, num_rounds=self.num_rounds, num_warmups=1)
        return {
            name: Cost(
                flops=attention_flops(model, batches), seconds=min(times[name]), open_share=open_share(model, batches)
            )
            for name, model in models.items()
        }

    def decoding(self, model: Decoder) -> dict[str, float]:
        """Seconds of a step of the engine by the model's routers; empty without the kernel."""
        (batch,) = self.batches()
        prompts = batch.input_ids_BT[:STREAMS].tolist()
        with one_thread(), torch.inference_mode():
            calls = {kind: decoding_call(with_routers(model, kind), prompts) for kind in (OWN, OPEN, CLOSED)}
            if not all(calls.values()):
                return {}
            timers = {kind: partial(own_seconds, call) for kind, call in calls.items() if call}
            times = in_turn(timers, num_rounds=10 * self.num_rounds, num_warmups=1)
        return {kind: min(of) for kind, of in times.items()}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of attention: FLOPs of a forward pass, seconds of a training step's, and the share of open heads."""

    flops: float
    seconds: float
    open_share: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All arms at their best rates, one entry for each seed. decoding: seconds of a step by `OWN`, `OPEN`, `CLOSED`."""

    rates: Mapping[str, float]
    window: int
    final: Mapping[str, Sequence[Outcome]]
    costs: Mapping[str, Sequence[Cost]]
    decoding: Sequence[Mapping[str, float]]


def of_seed(run: Run, seed: int) -> Run:
    """The run with a seed, which is that of the run that it starts from, too."""
    before = None if run.start_from is None else replace(run.start_from, seed=seed)
    return replace(run, seed=seed, start_from=before)


def execute_arm(setting: Setting, run: Run, *, begin: Path | None = None, keep: Path | None = None) -> Outcome:
    """`training_run.execute`, which starts a smaller model from the pruned weights of a larger one."""
    if run.start_from is None or begin is None:
        return execute(setting, run, keep=keep)
    vocab_size = prepare_text(setting).vocab_size
    teacher = Decoder(run.start_from.model_config(vocab_size))
    load_model(teacher, begin)
    rows = packed_rows(setting, seq_len=run.size.seq_len, mode=run.mode, split="train")
    moments = input_moments(teacher, islice(rows.batches(run.size.batch_rows), CALIBRATION_BATCHES))
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        pruned = Path(folder) / "pruned.safetensors"
        save_model(prune(teacher, run.model_config(vocab_size), moments), str(pruned))
        return execute(setting, run, begin=pruned, keep=keep)


def _contexts(batch: TokenBatch) -> Tensor:
    """Tokens that each token sees without a window, itself included, padding left out."""
    return batch.positions_BT[batch.segments_BT >= 0] + 1


@torch.no_grad()
def attention_flops(model: Decoder, batches: Sequence[TokenBatch]) -> float:
    """FLOPs of projections, scores, sums of values, routers and gates of a forward pass, 2 per multiply-add."""
    config, total = model.config, 0.0
    projected_dim = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)  # queries, outputs; keys, values
    for batch in batches:
        for layer, weight_N in heads_of_tokens(model, batch).items():
            contexts_N = _contexts(batch)
            window = config.window_of(layer)
            seen_N = contexts_N.clamp(max=window) if window else contexts_N
            total += 4.0 * config.head_dim * float((weight_N * seen_N).sum())
            total += 2.0 * config.model_dim * (projected_dim + config.router_dim + config.gate_dim) * len(contexts_N)
    return total


def heads_of_tokens(model: Decoder, batch: TokenBatch) -> dict[int, Tensor]:
    """Return how many heads of each layer are computed for each token, int64 [N], padding left out."""
    is_real_BT = batch.segments_BT >= 0
    every_N = torch.full((int(is_real_BT.sum()),), model.config.num_heads)
    heads = dict.fromkeys(range(model.config.num_layers), every_N)

    def see(layer: int, open_BTH: Tensor) -> None:
        heads[layer] = open_BTH[is_real_BT].sum(dim=-1)

    if model.config.router_dim:
        with decisions_seen(model, see):
            forward(model, batch)
    return heads


@torch.no_grad()
def open_share(model: Decoder, batches: Sequence[TokenBatch]) -> float:
    heads = [weight_N for batch in batches for weight_N in heads_of_tokens(model, batch).values()]
    return float(torch.cat(heads).double().mean()) / model.config.num_heads


def attention_call(model: Decoder, batch: TokenBatch) -> Callable[[], object]:
    """Attention of all layers on a batch, forward and backward, routers included, projections not."""
    attend = packed_attend(batch.segments_BT, model.config.windows)
    layers = _attention_inputs(model, batch, attend)

    def call() -> None:
        for block, inputs in layers:
            x_BTD, q_BTHd, k_BTHd, v_BTHd = leaves = [one.requires_grad_() for one in inputs]
            out_BTHd = block.attention.attended(x_BTD, q_BTHd, k_BTHd, v_BTHd, attend)
            torch.autograd.grad(out_BTHd.sum(), leaves, allow_unused=True)

    return call


def _attention_inputs(model: Decoder, batch: TokenBatch, attend: Attend) -> list[tuple[Block, list[Tensor]]]:
    """Each block with the input, queries, keys and values of its attention."""
    found: list[tuple[Block, list[Tensor]]] = []

    def keeping(block: Block, *inputs: Any) -> Tensor:
        found.append((block, [one.detach().clone() for one in inputs[:4]]))
        return type(block.attention).attended(block.attention, *inputs)

    blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
    for block in blocks:
        vars(block.attention)["attended"] = partial(keeping, block)
    try:
        with torch.no_grad():
            model(batch.input_ids_BT, batch.positions_BT, attend)
    finally:
        for block in blocks:
            del vars(block.attention)["attended"]
    return found


def with_routers(model: Decoder, kind: str) -> Decoder:
    """A copy of the model whose routers open their own heads, all, or none."""
    copy = Decoder(model.config)
    copy.load_state_dict(model.state_dict())
    for block in copy.blocks.values() if kind != OWN else ():
        assert isinstance(block, Block)
        router = Linear(model.config.model_dim, model.config.num_heads, bias=True)
        torch.nn.init.zeros_(router.weight)
        torch.nn.init.constant_(router.bias, 1.0 if kind == OPEN else -1.0)
        block.attention.head_router = router
    return copy.eval()


def decoding_call(model: Decoder, prompts: Sequence[list[int]]) -> Callable[[], object] | None:
    """The decode step of the last token of each prompt, whose other tokens are in the cache; None without the kernel
    that takes a step as one operator.
    """
    context = len(prompts[0]) - 1
    num_blocks = context // BLOCK_LEN + 1
    cache = PagedCache(model.config, len(prompts) * num_blocks, BLOCK_LEN, dtype=torch.float32, device=CPU)
    operator, _ = decode_operator(model, cache)
    if operator is None:
        return None
    multiple = stable_row_multiple(model, model.logits)
    runner = ModelRunner(model, model.logits, cache, AdapterSet(model), row_multiple=multiple, operator=operator)

    def sequences(num_cached: int) -> list[EngineSequence]:
        return [
            EngineSequence(str(number), prompt, 1, SamplingParams(), num_cached=num_cached,
                           block_table=[1 + number * num_blocks + place for place in range(num_blocks)])
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip

    runner.run(SchedulerOutput(chunks=[Chunk(sequence, 0, context) for sequence in sequences(0)]))
    return lambda: runner.run(SchedulerOutput(sequences(context)))


def own_seconds(call: Callable[[], object]) -> float:
    """This thread's own time of one call."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


TARGET_LOSS, TARGET_TIME = 2.0, 0.70
LOSS, FLOPS, TRAINING, DECODING = (
    "held-out loss, ",
    "attention FLOPs with projections, ",
    "attention in training, s, ",
    "decode step, s, ",
)
OPEN_SHARE = "share of open heads"
QUICK = Size(model_dim=64, num_layers=2, seq_len=128, batch_rows=4, num_steps=20)


def measure(setting: Setting) -> Measurement:
    """All arms; in quick mode shortened, at one rate and on two seeds."""
    bench = Bench(setting)
    if setting.quick:
        bench = Bench(
            setting,
            size=QUICK,
            rates=RATES[1:2],
            seeds=bench.seeds[:2],
            processes=Processes(),  # starting others takes longer than these runs
            at_once=1,
            num_rounds=3,
        )
    return measurement(bench.compare(), bench.size)


def measurement(found: Comparison, size: Size) -> Measurement:
    """Return losses, FLOPs and seconds of every arm by seed."""
    samples: dict[str, Sequence[float]] = {}
    for name, outcomes in found.final.items():
        costs = found.costs[name]
        samples[LOSS + name] = [outcome.heldout_loss for outcome in outcomes]
        samples[FLOPS + name] = [cost.flops for cost in costs]
        samples[TRAINING + name] = [cost.seconds for cost in costs]
    samples[OPEN_SHARE] = [cost.open_share for cost in found.costs[METHOD]]
    shape: ModelConfig = Run(size=size, model=SHAPE).model_config(VOCAB_SIZE)
    if all(found.decoding):
        samples |= {DECODING + kind: [times[kind] for times in found.decoding] for kind in (OWN, OPEN, CLOSED)}
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | described(__name__, found=found, shape=shape)
        | {
            "changed": CHANGED,
            "rates tried": ", ".join(map(str, RATES)) + "; and beyond where the best was at an end",
            "rates": "; ".join(f"{name}: {rate:g}" for name, rate in found.rates.items()),
            "time in decoding": f"steps of {STREAMS} streams with contexts of {size.seq_len - 1} held-out tokens; "
            "attention is what a step takes longer than one of the same model with all heads closed, and all heads are "
            "those of the same model with all of them open",
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()

    def to_all_heads(what: str, arm: str = METHOD) -> Estimate:
        return ratios(samples[what + arm], samples[what + PLAIN])

    above, what = percent_above(samples[LOSS + METHOD], samples[LOSS + PLAIN]), "loss above all heads"
    say = "held-out loss {0.mean:+.2f}% from attention of all heads at equal tokens"
    judgment.ask("held-out loss above all heads", above, "%", "<=", TARGET_LOSS, what=what, say=say)
    name, what = "attention FLOPs with projections, dynamic to all heads", "FLOPs of attention"
    say = "{0.mean:.2f} of the FLOPs of attention"
    judgment.ask(name, partial(to_all_heads, FLOPS), "x", "<=", TARGET_COMPUTE, what=what, say=say)
    what, say = "time of attention in training", "{0.mean:.2f} of its time in training"
    judgment.ask(f"{what}, dynamic to all heads", to_all_heads(TRAINING), "x", "<=", TARGET_TIME, what=what, say=say)
    with judgment.part():
        own, whole, none = (samples[DECODING + kind] for kind in (OWN, OPEN, CLOSED))
        decoding = ratios(*([one - floor for one, floor in zip(of, none, strict=True)] for of in (own, whole)))
        what, say = "time of attention in decoding", "{0.mean:.2f} of it in decoding"
        judgment.ask(f"{what}, dynamic to all heads", decoding, "x", "<=", TARGET_TIME, what=what, say=say)
        judgment.ask("time of a decode step, dynamic to all heads", ratios(own, whole), "x")
    for rival in RIVALS:
        with judgment.part():
            losses = samples[LOSS + METHOD], samples[LOSS + rival]
            what, say = f"difference to {rival}", "{0.mean:+.4f} nats from " + rival
            judgment.ask(f"against {rival}", differences(*losses), "nats", "<", 0.0, what=what, say=say)
            name = f"attention FLOPs with projections, {rival} to all heads"
            judgment.note(name, partial(to_all_heads, FLOPS, rival), "x")
            judgment.ask(f"time of attention in training, {rival} to all heads", to_all_heads(TRAINING, rival), "x")
            judgment.differs(
                *losses, f"p-value against {rival}", f"not different from {rival} with p < 0.05 (p = {{p}})"
            )
    judgment.show(samples, [OPEN_SHARE])
    judgment.show(samples, [LOSS + arm for arm in names_between(samples, LOSS)], "nats")
    return judgment.verdict()


CLAIM = declared(__name__)
