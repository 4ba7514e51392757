"""Claim: federated averaging ends near central training on the same samples, also where each client holds other
modules.
"""

import gc
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from safetensors.torch import load_model, save_model

from modelwright.core.artifacts import StageDir, write_atomic
from modelwright.core.config import derive_seed, parse
from modelwright.data.document import Document
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import PackConfig, pack
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright_claims import training_run, workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import best_value, open_cache, tune_grids
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import percent_above
from modelwright_claims.training_run import HELDOUT_ROWS, loss_on
from modelwright_claims.workbench import VOCAB_SIZE, Size

if TYPE_CHECKING:  # the list of claims is read without Flower, which takes seconds to import
    from flwr.app import Context
    from flwr.serverapp import Grid

    from modelwright_federated.config import FederatedConfig
    from modelwright_federated.local_training import LocalTraining

NUM_CLIENTS = 4
NAMES = tuple(f"client-{number}" for number in range(NUM_CLIENTS))
OLD_SOURCES, NEW_SOURCES = ("python:stdlib", "python:topics"), ("python:torch", "python:numpy")
Split = Literal["iid", "module"]
Method = Literal["iid", "module", "sgd", "adamw"]
"""Federated averaging over clients of either split, or central training by either optimizer."""
CENTRAL: tuple[Method, ...] = ("sgd", "adamw")
ROUND_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes that all runs share. Central training makes `num_clients x num_rounds x local_steps` steps."""

    model: Size
    num_rounds: int
    local_steps: int
    fraction: float

    @property
    def num_central_steps(self) -> int:
        return NUM_CLIENTS * self.num_rounds * self.local_steps


@dataclass(frozen=True, kw_only=True)
class FederatedRun:
    """A single training. heldout: the split on which its loss is taken."""

    plan: Plan
    method: Method
    learning_rate: float
    seed: int
    heldout: Literal["validation", "test"] = "test"


def prepare(folder: Path, plan: Plan) -> None:
    """Write the rows of all sides and the first model into `folder`, unless they exist."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    documents = [one for one in machine_corpus(fraction=plan.fraction, skip=lambda *_: None) if one.kind == "prose"]
    old = [one for one in documents if one.source in OLD_SOURCES and one.split == "train"]
    new = [one for one in documents if one.source in NEW_SOURCES]
    tokenizer = train_tokenizer((one.text for one in old), TokenizerConfig(vocab_size=VOCAB_SIZE))
    _pack(old, folder / "old", tokenizer, plan)
    heldout = [one for one in new if one.split == "heldout"]
    for number, name in enumerate(("validation", "test")):
        _pack(heldout[number::2], folder / name, tokenizer, plan)
    training = [one for one in new if one.split == "train"]
    _pack(training, folder / "central", tokenizer, plan)
    for split in ("iid", "module"):
        for name, own in zip(NAMES, dealt(training, split), strict=True):
            _pack(own, folder / split / name, tokenizer, plan)
    model = Decoder(plan.model.model_config(tokenizer.vocab_size))
    model.init_weights(0)
    loader = PackedLoader(PackedRows(folder / "old"), batch_rows=plan.model.batch_rows, seed=0)
    _train(model, loader, plan.model.train_config(), folder / "first", seed=0)
    save_model(model, str(folder / "first.safetensors"))
    write_atomic(folder / "done", json.dumps({"vocab_size": tokenizer.vocab_size}))


def dealt(documents: Sequence[Document], split: Split) -> list[list[Document]]:
    """The documents of each client, about as many characters for all: at random, or whole modules in the order of
    their names, so that neighbors in a library stay together.
    """
    if split == "iid":
        ordered = sorted(documents, key=lambda one: derive_seed(0, "deal", one.id))
    else:
        ordered = sorted(documents, key=lambda one: (one.meta["module"], one.id))
    ends = np.cumsum([len(one.text) for one in ordered])
    clients = np.minimum(NUM_CLIENTS - 1, (ends - 1) * NUM_CLIENTS // ends[-1])
    if split == "module":  # a module goes where it begins
        first = {one.meta["module"]: client for one, client in reversed(list(zip(ordered, clients, strict=True)))}
        clients = [first[one.meta["module"]] for one in ordered]
    return [[one for one, at in zip(ordered, clients, strict=True) if at == client] for client in range(NUM_CLIENTS)]


def _pack(documents: Sequence[Document], folder: Path, tokenizer: Tokenizer, plan: Plan) -> None:
    sequences = ((ids, None) for ids in tokenizer.encode_documents([one.text for one in documents]))
    config = PackConfig(seq_len=plan.model.seq_len, mode="best_fit")
    pack(sequences, folder, config, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)


def heldout_losses(folder: Path, runs: Sequence[FederatedRun]) -> Iterator[tuple[FederatedRun, float]]:
    """Make trainings; yields each with the held-out loss at its end, in nats per token. folder: of `prepare`.

    Central ones come first and are made side by side, each in a process of one thread, as clients are: a step of so
    small a model does not keep several threads busy.
    """
    central = [run for run in runs if run.method in CENTRAL]
    if central:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=_forking(), initializer=_use_one_thread) as pool:
            yield from zip(central, pool.map(partial(_heldout_loss, folder), central), strict=True)
    yield from ((run, _heldout_loss(folder, run)) for run in runs if run.method not in CENTRAL)


def _heldout_loss(folder: Path, run: FederatedRun) -> float:
    model = _first_model(folder, run.plan)
    if run.method in CENTRAL:
        loader = PackedLoader(PackedRows(folder / "central"), batch_rows=run.plan.model.batch_rows, seed=run.seed)
        _train(model, loader, _central_config(run), folder / f"central-{os.getpid()}", seed=run.seed)
    else:
        from modelwright_federated.config import FederatedLoraConfig
        from modelwright_federated.weights import GlobalWeights

        weights = GlobalWeights(model, FederatedLoraConfig())
        weights.write(_federated(folder, run, weights.read()))
    return loss_on(model, list(PackedRows(folder / run.heldout).batches(HELDOUT_ROWS)))


def first_loss(folder: Path, run: FederatedRun) -> float:
    """The held-out loss of the model that every training starts from."""
    return loss_on(_first_model(folder, run.plan), list(PackedRows(folder / run.heldout).batches(HELDOUT_ROWS)))


def _first_model(folder: Path, plan: Plan) -> Decoder:
    model = Decoder(plan.model.model_config(json.loads((folder / "done").read_text())["vocab_size"]))
    load_model(model, folder / "first.safetensors")
    return model


def _central_config(run: FederatedRun) -> TrainConfig:
    """Plain steps as clients make them, or AdamW with warmup and decay."""
    if run.method == "sgd":
        return _plain_steps(run, run.plan.num_central_steps)
    return run.plan.model.train_config(num_steps=run.plan.num_central_steps, learning_rate=run.learning_rate)


def _plain_steps(run: FederatedRun, num_steps: int) -> TrainConfig:
    plain: dict[str, Any] = {
        "optimizer": "sgd",
        "learning_rate": run.learning_rate,
        "batch_tokens": run.plan.model.batch_tokens,
        "num_steps": num_steps,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "precision": {"policy": "fp32"},
        "eval_every_steps": 0,
        "checkpoint_every_minutes": 0,
        "keep_best": False,
    }
    return parse(TrainConfig, plain, constants=True)


def _train(model: Decoder, loader: PackedLoader, config: TrainConfig, stage: Path, *, seed: int) -> None:
    shutil.rmtree(stage, ignore_errors=True)
    train(
        TrainJob(
            model=model,
            objective=NextToken(loader),
            config=config,
            num_steps=config.num_steps,
            stage=StageDir(stage),
            seed=seed,
            input_digest="claim",
        )
    )


def _federated(folder: Path, run: FederatedRun, weights: np.ndarray) -> np.ndarray:
    """The global weights after all rounds, by Flower's simulation with processes of one thread."""
    from modelwright_federated.client import FederatedClient
    from modelwright_federated.server import FederatedServer, simulate

    shutil.rmtree(folder / "server", ignore_errors=True)
    config, results = _federated_config(run), list[np.ndarray]()

    def rounds(grid: "Grid", context: "Context") -> None:
        server = FederatedServer(
            config=config, grid=grid, context=context, weights=weights, folder=folder / "server", note=lambda line: None
        )
        results.append(server.run())

    simulate(
        rounds,
        lambda number: FederatedClient(
            name=NAMES[number], config=config, training=partial(_local_training, folder, run, NAMES[number])
        ),
        num_clients=NUM_CLIENTS,
        num_processes=min(NUM_CLIENTS, os.cpu_count() or 1),
    )
    return results[0]


def _forking() -> ForkServerContext:
    """Processes that are forked from one that has imported PyTorch and this module, which takes seconds of a core."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _use_one_thread() -> None:
    """Begin a forked process."""
    torch.set_num_threads(1)
    gc.freeze()  # every training begins with a full collection, which takes 0.2 s for what the imports have made


def _federated_config(run: FederatedRun) -> "FederatedConfig":
    from modelwright_federated.config import FederatedConfig

    return FederatedConfig(
        num_rounds=run.plan.num_rounds,
        local_steps=run.plan.local_steps,
        optimizer="sgd",
        learning_rate=run.learning_rate,
        batch_tokens=run.plan.model.batch_tokens,
        min_clients=NUM_CLIENTS,
        round_timeout_s=ROUND_TIMEOUT_S,
    )


def _local_training(folder: Path, run: FederatedRun, name: str) -> "LocalTraining":
    """Return the training of a client, in a process of the simulation."""
    from modelwright_federated.local_training import LocalTraining

    torch.set_num_threads(1)
    rows = PackedRows(folder / run.method / name)
    return LocalTraining(
        model=_first_model(folder, run.plan),
        source=PackedLoader(rows, batch_rows=run.plan.model.batch_rows, seed=derive_seed(run.seed, name)),
        objective=NextToken,
        config=_federated_config(run),
        training=_plain_steps(run, run.plan.local_steps),
        folder=folder / "rounds" / name,
        seed=run.seed,
    )


def sizes(folder: Path) -> Mapping[str, int]:
    """Rows of each client, by `split/name`."""
    return {
        f"{split}/{name}": PackedRows(folder / split / name).num_rows for split in ("iid", "module") for name in NAMES
    }


MOST_ABOVE: Mapping[str, float] = {"iid": 2.0, "module": 5.0}
"""Percent of the loss of central training, by how the clients' samples were dealt."""
LOSS = "held-out loss, "
METHODS: tuple[Method, ...] = get_args(Method)
RATES: Mapping[Method, Sequence[float]] = {
    "iid": (0.1, 0.3, 1.0), "module": (0.1, 0.3, 1.0), "sgd": (0.1, 0.3, 1.0), "adamw": (3e-4, 1e-3, 3e-3),
}  # fmt: skip
TUNING_SEED = 100
WORDS = {
    "iid": "averaging, IID", "module": "averaging, by module", "sgd": "central, SGD", "adamw": "central, AdamW",
    "first": "before fine-tuning",
}  # fmt: skip


def plan_of(setting: Setting) -> Plan:
    if setting.quick:
        small = Size(model_dim=64, num_layers=1, seq_len=64, batch_rows=4, num_steps=40, learning_rate=3e-3)
        return Plan(model=small, num_rounds=2, local_steps=3, fraction=0.1)
    size = Size(model_dim=128, num_layers=2, seq_len=256, batch_rows=4, num_steps=400, learning_rate=3e-3)
    return Plan(model=size, num_rounds=20, local_steps=10, fraction=1.0)


def measure(setting: Setting) -> Measurement:
    plan, folder = plan_of(setting), setting.folder / "federated"
    prepare(folder, plan)
    cache = open_cache(setting, sys.modules[__name__], training_run, workbench, name="federated")

    def losses(runs: Sequence[FederatedRun]) -> list[float]:
        for run, loss in heldout_losses(folder, [run for run in runs if run not in cache]):
            cache[run] = loss
            setting.progress.note(f"{WORDS[run.method]} at {run.learning_rate:g}, seed {run.seed}: {loss:.4f}")
        return [cache[run] for run in runs]

    seeds = range(1 if setting.quick else 3)
    rates: Mapping[Method, float] = (
        {method: RATES[method][1] for method in METHODS} if setting.quick else _best_rates(plan, losses)
    )
    tuned = [
        FederatedRun(plan=plan, method=method, learning_rate=rates[method], seed=seed)
        for method in METHODS
        for seed in seeds
    ]
    samples: dict[str, list[float]] = {LOSS + method: [] for method in METHODS}
    for run, loss in zip(tuned, losses(tuned), strict=True):
        samples[LOSS + run.method].append(loss)
    untrained = FederatedRun(plan=replace(plan, num_rounds=0), method="sgd", learning_rate=0.0, seed=0)
    samples[LOSS + "first"] = [cache.get(untrained, lambda: first_loss(folder, untrained))]
    rows, num_seeds = sizes(folder), len(seeds)
    return Measurement(
        samples=samples,
        conditions=plan.model.describe()
        | {
            "clients": NUM_CLIENTS,
            "rounds": plan.num_rounds,
            "local steps": plan.local_steps,
            "samples": f"{plan.num_central_steps * plan.model.batch_rows} rows in every arm",
            "rates": ", ".join(f"{WORDS[method]} {rate:g}" for method, rate in rates.items()),
            "tuned on": "another seed and another half of the held-out modules",
            "text": "documentation of the standard library first; of PyTorch and NumPy at the clients, held out by "
            "module",
            "rows of clients": ", ".join(f"{name} {count}" for name, count in rows.items()),
            "seeds": num_seeds,
            "optimizer": "plain SGD at a constant rate at the clients; central SGD alike, AdamW with warmup and decay",
        },
    )


def _best_rates(plan: Plan, losses: Callable[[Sequence[FederatedRun]], list[float]]) -> dict[Method, float]:
    """Return the rate of each method with the lowest loss on the validation split. losses: makes runs."""

    def tuning(method: Method, rate: float) -> FederatedRun:
        return FederatedRun(plan=plan, method=method, learning_rate=rate, seed=TUNING_SEED, heldout="validation")

    tuned = tune_grids(RATES, lambda tried: losses([tuning(method, rate) for method, rate in tried]), "rate")
    return {method: best_value(of_method) for method, of_method in tuned.items()}


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    with judgment.part():
        best = min(CENTRAL, key=lambda method: statistics.fmean(samples[LOSS + method]))
        for split, limit in MOST_ABOVE.items():
            above = {method: percent_above(samples[LOSS + split], samples[LOSS + method]) for method in CENTRAL}
            for method in CENTRAL:
                judgment.ask(f"loss above {WORDS[method]}, {WORDS[split]}", above[method], "%")
            what, say = f"{WORDS[split]}, loss above {WORDS[best]}", f" beside {WORDS[best]}, the better central one"
            say = f"{WORDS[split]} ends {{0.mean:+.2f}}%{say}"
            judgment.ask("", above[best], "%", "<=", limit, what=what, say=say)
    judgment.show(samples, {LOSS + WORDS[method]: LOSS + method for method in (*METHODS, "first")}, "nats")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    statement="Federated averaging ends near central training on as many samples, also where each client holds other "
    "modules.",
    source="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017 "
    "(arXiv:1602.05629); Zhao et al., Federated Learning with Non-IID Data, 2018 (arXiv:1806.00582)",
    published="direction: the accuracy of central training with IID samples, and less where clients hold other classes",
    compared=f"{NUM_CLIENTS} clients in Flower's simulation, samples dealt at random and by module, against central "
    "SGD and AdamW on the same rows; equal samples, each arm at its own best rate, paired seeds",
    target=f"at most {MOST_ABOVE['iid']:g}% above the loss of the better central training for samples dealt at random, "
    f"at most {MOST_ABOVE['module']:g}% by module",
    headline=tuple(f"loss above {WORDS[method]}, {WORDS[split]}" for split in MOST_ABOVE for method in CENTRAL),
)
