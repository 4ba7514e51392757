"""Measurement of candidates' latency on the serving engine, their training by the training loop, and the journal of
both.

The journal records everything that was measured or trained under its inputs, so that two strategies that propose the
same candidate share the work; the budget of each is charged as if it were alone. A strategy is a deterministic function
of the results of its trials: started again after a kill, it proposes the same trials, gets the recorded results, and
continues with the first trial that the journal lacks.

Latency is that of a decoded token of a model with random weights, with the steps of `infer/engine.py` timed one by one.
Random weights suffice, because the engine does the same work whatever the weights are, and no stop token is set.
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import ArtifactError, StageDir, StorageError
from modelwright.core.config import STOPPING, ConfigError, ModelwrightError, derive_seed, digest, dump
from modelwright.core.progress import Progress
from modelwright.core.records import EventLog
from modelwright.data.images.store import open_images
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import load_model
from modelwright.parallel.mesh import World
from modelwright.pipeline.stage import RunConfig, StageInputs
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.rows import heldout_sample
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright_search.space import ModelCandidate

JOURNAL = "journal.jsonl"
MAX_LINES = 1_000_000
NUM_APPEALS = 2
"""Number of further measurements of a shape that seems to exceed the latency limit."""
DOUBTFUL = 1.3
"""Largest ratio of latency to limit at which a shape is measured again."""


class Journal:
    """Facts by kind and key, in a file. A last line that was cut off by a kill is dropped."""

    def __init__(self, path: Path) -> None:
        self._log = EventLog(path, max_events=MAX_LINES, keep_existing=True)
        try:
            self._facts = {(fact["kind"], fact["key"]): fact for fact in self._log.events}
        except (KeyError, TypeError):
            raise ArtifactError(f"{path}: is damaged; remove it, or search again with --restart") from None

    def once(self, kind: str, key: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the recorded fact, or else calls `make` and records its result."""
        if (kind, key) not in self._facts:
            self._log.append(kind=kind, key=key, **make())
            self._facts[kind, key] = self._log.events[-1]
        return self._facts[kind, key]

    def check_identity(self, identity: Mapping[str, Any], folder: Path) -> None:
        """Raises `ConfigError` with the first difference if the journal belongs to another search."""
        known = self.once("search", "", lambda: {"identity": dict(identity)})["identity"]
        for name, value in identity.items():
            if known.get(name) != value:
                raise ConfigError(
                    f"{folder}: holds a search with another {name} ({known.get(name)!r}, now {value!r}); give the same "
                    "one to continue it, or --restart to discard its trials"
                )


PATIENCE_ROUNDS, MAX_ROUNDS = 6, 30
"""Number of rounds of decoding without a gain of more than `GAIN` in the fastest step after which the measurement ends,
and largest number of rounds. The fastest step counts, because other load only ever adds time: with six processes on two
cores, six measurements of a shape spread over 2% by the fastest step, and over 15% by the lower quartile."""
GAIN = 0.01
ROUND_TOKENS = 24
"""Number of timed tokens of each stream in a round."""
WARMUP_TOKENS = 4
"""Number of decoded tokens of a round that are not timed."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load of the engine while it is timed."""

    engine: EngineConfig
    num_streams: int
    """Number of answers that are decoded at once."""
    prompt_len: int
    """Length of each prompt in tokens."""


def load_for(model: ModelConfig, engine: EngineConfig, num_streams: int) -> Load:
    """Returns a load with prompts of half of the context, so that reads of the cache take their usual share of the
    time.
    """
    prompt_len = max(1, min(model.max_seq_len // 2, model.max_seq_len - ROUND_TOKENS - WARMUP_TOKENS - 1))
    needed = num_streams * model.max_seq_len
    return Load(
        engine=replace(
            engine,
            kv_cache_tokens=max(engine.kv_cache_tokens, needed),
            max_num_seqs=max(engine.max_num_seqs, num_streams),
            enable_prefix_caching=False,
        ),
        num_streams=num_streams,
        prompt_len=prompt_len,
    )


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Measures and trains candidates of one run. num_tokens: tokens of a training of full length; load: load under
    which latency is measured; rows: folder with the packed rows of the first training, `train` and `heldout`.
    """

    config: RunConfig
    rows: Path
    folder: Path
    num_tokens: int
    load: Load
    world: World
    journal: Journal
    progress: Progress

    def latency_ms(self, shape: ModelConfig, limit_ms: float = math.inf) -> float:
        """Returns the time of a decoded token, measured once for each shape. A shape just beyond the limit is measured
        again, because other load only ever adds time.
        """

        def measure() -> Mapping[str, Any]:
            latency_ms = self.measure(shape)
            for _ in range(NUM_APPEALS):
                if limit_ms < latency_ms <= DOUBTFUL * limit_ms:
                    latency_ms = min(latency_ms, self.measure(shape))
            return {"ms": latency_ms}

        return self.journal.once("latency", digest(shape), measure)["ms"]

    def measure(self, shape: ModelConfig) -> float:
        """Measures the time of a decoded token now, in a fresh engine."""
        return decode_latency_ms(shape, self.load, self.world)

    def flops(self, candidate: ModelCandidate, share: float) -> float:
        """Computes the planned training FLOPs, three forward passes for each token."""
        num_tokens = self.num_steps(candidate.training, share) * candidate.training.batch_tokens
        # A token attends to half of its document on average, and a document is taken to be half of a row.
        return 3.0 * candidate.model.flops_per_token(self.config.model.max_seq_len / 4) * num_tokens

    def num_steps(self, training: TrainConfig, share: float) -> int:
        """Returns the number of updates for a share of the full length: equally many tokens whatever the batch."""
        return max(1, round(self.num_tokens * share / training.batch_tokens))

    def train(self, candidate: ModelCandidate, share: float, seed: int, name: str) -> float | None:
        """Trains from scratch for a share of the full length, with a whole schedule; returns the held-out loss, None if
        the training failed. A killed training resumes from its newest checkpoint. Raises `Stopped` when it is asked to
        stop.
        """
        num_steps = self.num_steps(candidate.training, share)
        key = digest(
            {
                "model": dump(candidate.model, constants=True),
                "training": candidate.training.identity(),
                "num_steps": num_steps,
                "seed": seed,
            }
        )
        stage = StageDir(self.folder / "trainings" / key[:16])

        def run() -> Mapping[str, Any]:
            started, loss, problem = time.monotonic(), None, ""
            try:
                job = self._job(candidate, num_steps, seed, name, stage, key)
                loss = train(job, self.world, self.progress).heldout_loss
            except (*STOPPING, StorageError):
                raise
            except ModelwrightError as error:  # it has diverged, for example: a result as good as another
                problem = str(error)
            if loss is not None and not math.isfinite(loss):
                loss, problem = None, "the held-out loss is not finite"
            return {"loss": loss, "problem": problem, "seconds": time.monotonic() - started}

        record = self.journal.once("training", key, run)
        shutil.rmtree(stage.path, ignore_errors=True)
        if record["problem"]:
            self.progress.note(f"{name}: {record['problem']}")
        return record["loss"]

    def _job(
        self, candidate: ModelCandidate, num_steps: int, seed: int, name: str, stage: StageDir, input_digest: str
    ) -> TrainJob:
        """Returns the training of a candidate: that of the run, but with its own length and without anything that costs
        time in addition to the steps.
        """
        # The objective of the run's first training, on its rows in the order of this seed.
        packed, spec, training = PackedRows(self.rows / "train"), self.config.trainings[0], candidate.training
        assert spec.objective is not None
        loader = PackedLoader(
            packed,
            batch_rows=training.batch_rows(packed.seq_len * spec.trained_rows),
            seed=derive_seed(self.config.seed, "search", "order", seed),
        )
        inputs = StageInputs(
            config=self.config,
            training=training,
            loader=loader,
            plan=loader,
            images=open_images(self.rows, "train"),
            parents={INIT.name: Path(self.config.init_from)} if self.config.init_from else {},
            world=self.world,
            folder=stage.path,
            note=self.progress.note,
        )
        if self.config.init_from:
            model = load_model(Path(self.config.init_from))
        else:
            model = Decoder(candidate.model)
            model.init_weights(derive_seed(self.config.seed, "search", "init", seed))
        return TrainJob(
            model=model,
            objective=spec.objective(inputs),
            config=replace(
                training,
                num_steps=num_steps,
                num_tokens=0,
                num_epochs=0.0,
                eval_every_steps=0,
                checkpoint_every_steps=0,
                keep_best=False,
                loss_spikes=replace(training.loss_spikes, rollback_after=0),
            ),
            num_steps=num_steps,
            stage=stage,
            seed=derive_seed(self.config.seed, "search", seed),
            name=name,
            input_digest=input_digest,
            heldout=self.heldout(),
        )

    def heldout(self) -> Sequence[TokenBatch]:
        """Returns the run's own sample of held-out rows, the same for every candidate."""
        training, spec = self.config.first_training, self.config.trainings[0]
        rows = training.batch_rows(PackedRows(self.rows / "train").seq_len * spec.trained_rows)
        batch_rows = max(1, rows // training.gradient_accumulation_steps)
        return heldout_sample(self.rows / "heldout", self.config, batch_rows=batch_rows)


def decode_latency_ms(shape: ModelConfig, load: Load, world: World) -> float:
    """Measures the fastest decoding step of a fresh engine with a model of this shape, in milliseconds: the least time
    that each of `load.num_streams` answers waits for a token.
    """
    model = Decoder(shape)
    model.init_weights(0)
    engine = Engine(model.to(world.device).eval(), load.engine)
    best_ms, last_gain = min(_step_times_ms(engine, load, 0)), 0
    for number in range(1, MAX_ROUNDS):
        if number - last_gain > PATIENCE_ROUNDS:
            break
        round_ms = min(_step_times_ms(engine, load, number))
        last_gain = number if round_ms < (1.0 - GAIN) * best_ms else last_gain
        best_ms = min(best_ms, round_ms)
    return best_ms


def _step_times_ms(engine: Engine, load: Load, number: int) -> list[float]:
    """Times the decoding steps of one round. Raises `ConfigError` if the answers never decode all at once."""
    params = SamplingParams(max_tokens=engine.max_seq_len, temperature=0.0)
    names = [f"{number}/{stream}" for stream in range(load.num_streams)]
    for stream, name in enumerate(names):
        engine.add(name, [(stream + number + place) % engine.vocab_size for place in range(load.prompt_len)], params)
    begun: set[str] = set()
    while len(begun) < load.num_streams and engine.has_work:  # prompts, in chunks
        begun |= {output.request_id for output in engine.step()}
    times: list[float] = []
    while engine.has_work and len(times) < WARMUP_TOKENS + ROUND_TOKENS:
        started = time.perf_counter()
        outputs = engine.step()  # the sampled tokens are on the host when it returns
        if len(outputs) < load.num_streams:
            break  # an answer has ended at the end of its context
        times.append(1e3 * (time.perf_counter() - started))
    for name in names:
        engine.abort(name)
    if not times:
        raise ConfigError(
            f"--streams: {load.num_streams} answers never decode together within a context of {engine.max_seq_len} "
            "tokens (model.max_seq_len); lower the one or raise the other"
        )
    return times[WARMUP_TOKENS:] or times
