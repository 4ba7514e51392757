"""What becomes of a candidate: it is measured on the engine, and trained by the loop of all trainings.

Both are remembered in the journal by what they depend on, so that two strategies that propose one candidate share the
work; the budget of each is charged as if it were alone.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.core.config import digest, dump
from modelwright.core.errors import STOPPING, ModelwrightError, StorageError
from modelwright.core.progress import Progress
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.batch import TokenBatch
from modelwright.data.images.store import open_images
from modelwright.data.loader import PackedLoader, PackedRows
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.parallel.mesh import World
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.row_use import heldout_sample
from modelwright.search.journal import Journal
from modelwright.search.latency import Load, decode_latency_ms
from modelwright.search.space import ModelCandidate
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.objective import Objective

NUM_APPEALS = 2
"""Further measurements of a shape that seems to exceed the limit of latency."""
DOUBTFUL = 1.3
"""How far beyond the limit, as a factor, a latency may be for that."""


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """What a training ended with. loss: held-out, None if it failed; problem: why it did."""

    loss: float | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Measures and trains candidates of one run. num_tokens: of a training of full length; load: what latency is
    measured under; rows: folder with the packed rows of the first training, `train` and `heldout`.
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
        """The time of a decoded token, measured once for each shape. One that seems just beyond the limit is measured
        again, because what else the machine does only ever adds time.
        """

        def measure() -> Mapping[str, Any]:
            latency_ms = self.measure(shape)
            for _ in range(NUM_APPEALS):
                if limit_ms < latency_ms <= DOUBTFUL * limit_ms:
                    latency_ms = min(latency_ms, self.measure(shape))
            return {"ms": latency_ms}

        return self.journal.once("latency", digest(shape), measure)["ms"]

    def measure(self, shape: ModelConfig) -> float:
        """The same, in a fresh engine each time."""
        return decode_latency_ms(shape, self.load, self.world)

    def flops(self, candidate: ModelCandidate, share: float) -> float:
        """Planned training FLOPs, three forward passes for each token."""
        num_tokens = self.num_steps(candidate.training, share) * candidate.training.batch_tokens
        return 3.0 * candidate.model.flops_per_token(self.mean_context) * num_tokens

    @property
    def mean_context(self) -> float:
        """Positions that a token attends to: half of a document, which is taken to be half of a row."""
        return self.config.model.max_seq_len / 4

    def num_steps(self, training: TrainConfig, share: float) -> int:
        """Updates of a share of the full length: equally many tokens whatever the batch."""
        return max(1, round(self.num_tokens * share / training.batch_tokens))

    def train(self, candidate: ModelCandidate, share: float, seed: int, name: str) -> TrainingOutcome:
        """Train from scratch for a share of the full length, with a whole schedule, and evaluate. A training that was
        killed goes on from its newest checkpoint. Raises `Stopped` when it is asked to stop.
        """
        num_steps = self.num_steps(candidate.training, share)
        settings = {
            "model": dump(candidate.model, constants=True),
            "training": candidate.training.identity(),
            "num_steps": num_steps,
            "seed": seed,
        }
        key = digest(settings)
        stage = StageDir(self.folder / "trainings" / key[:16])

        def run() -> Mapping[str, Any]:
            started = time.monotonic()
            outcome = self._outcome(self.job(candidate, num_steps, seed, name, stage, key))
            return {"loss": outcome.loss, "problem": outcome.problem, "seconds": time.monotonic() - started}

        record = self.journal.once("training", key, run)
        shutil.rmtree(stage.path, ignore_errors=True)
        return TrainingOutcome(loss=record["loss"], problem=record["problem"])

    def _outcome(self, job: TrainJob) -> TrainingOutcome:
        try:
            loss = train(job, self.world, self.progress).heldout_loss
        except (*STOPPING, StorageError):
            raise
        except ModelwrightError as error:  # it has diverged, for example: a result as good as another
            return TrainingOutcome(loss=None, problem=str(error))
        if not math.isfinite(loss):
            return TrainingOutcome(loss=None, problem="the held-out loss is not finite")
        return TrainingOutcome(loss=loss)

    def job(
        self, candidate: ModelCandidate, num_steps: int, seed: int, name: str, stage: StageDir, input_digest: str
    ) -> TrainJob:
        """The training of a candidate: that of the run, with its own length and without what only costs time."""
        return TrainJob(
            model=self._initial(candidate.model, seed),
            objective=self.objective(candidate.training, seed, stage.path),
            config=short_training(candidate.training, num_steps),
            num_steps=num_steps,
            stage=stage,
            seed=derive_seed(self.config.seed, "search", seed),
            name=name,
            input_digest=input_digest,
            heldout=self.heldout(),
        )

    def _initial(self, shape: ModelConfig, seed: int) -> Decoder:
        if self.config.init_from:
            return load_model(Path(self.config.init_from))
        model = Decoder(shape)
        model.init_weights(derive_seed(self.config.seed, "search", "init", seed))
        return model

    def objective(self, training: TrainConfig, seed: int, folder: Path) -> Objective:
        """What the first training of the run learns, from its rows in the order of this seed."""
        packed, spec = PackedRows(self.rows / "train"), self.config.trainings[0]
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
            folder=folder,
            note=self.progress.note,
        )
        return spec.objective(inputs)

    def heldout(self) -> Sequence[TokenBatch]:
        """The run's own sample of held-out rows, the same for every candidate."""
        training, spec = self.config.first_training, self.config.trainings[0]
        rows = training.batch_rows(PackedRows(self.rows / "train").seq_len * spec.trained_rows)
        batch_rows = max(1, rows // training.gradient_accumulation_steps)
        return heldout_sample(self.rows / "heldout", self.config, batch_rows=batch_rows)


def short_training(training: TrainConfig, num_steps: int) -> TrainConfig:
    """A stage's own settings, except its length and everything that costs time besides the steps."""
    return replace(
        training,
        num_steps=num_steps,
        num_tokens=0,
        num_epochs=0.0,
        eval_every_steps=0,
        checkpoint_every_steps=0,
        keep_best=False,
        loss_spikes=replace(training.loss_spikes, rollback_after=0),
    )
