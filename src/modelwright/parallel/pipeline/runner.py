"""Pipeline parallelism: each rank of one axis holds some of the layers, and microbatches flow through the ranks.

Schedules are PyTorch's: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021), zero bubble (Qi
et al. 2023: ZB-H1 with one stage a rank, ZB-V with two). One microbatch makes any of them a plain layer-to-device map.
Gradients are sums over microbatches: nothing is averaged here.

Legend: B rows, T tokens of a row that this rank computes, D model width.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from modelwright.core.config import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Attend, Decoder
from modelwright.ops.dtensor import local
from modelwright.parallel.context_parallel import shard_sequence
from modelwright.parallel.mesh import Mesh, ParallelConfig
from modelwright.parallel.pipeline import stages
from modelwright.parallel.pipeline.balance import StageSpan, StageTimeline
from modelwright.parallel.sharded_weights import sharded_modules
from modelwright.parallel.tensor_parallel import stage_tokens

Schedule = (
    ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble | ScheduleZBVZeroBubble
)
Microbatch = tuple[Attend, TokenBatch]
TIED = "embedding.weight"


class ModelStage:
    """Stage of a pipeline: a part of the model from hidden states to hidden states. Every rank has the rest of a
    microbatch (tokens, positions, documents): `feed` provides it in order.
    """

    def __init__(
        self, model: Decoder, layers: range, index: int, num_stages: int, *, passes: Callable[[Decoder], Decoder]
    ) -> None:
        self.index = index
        self.layers = layers
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.part = passes(stages.cut(model, layers, is_first=self.is_first, is_last=self.is_last))
        # A call of the part then runs FSDP's hooks around it.
        self.part.__dict__["forward"] = self._forward
        # Many microbatches pass before and between the backwards; each would gather the weights again.
        for module in sharded_modules(self.part):
            module.set_reshard_after_forward(False)
        self.feed: Iterator[Microbatch] = iter(())

    def _forward(self, hidden_BTD: Tensor | None = None) -> Tensor:
        attend, batch = next(self.feed)
        entering_BTD = self.part.embed(batch.input_ids_BT, batch.positions_BT) if hidden_BTD is None else hidden_BTD
        leaving_BTD = self.part.run_blocks(entering_BTD, batch.positions_BT, attend)
        return self.part.norm(leaving_BTD) if self.is_last else leaving_BTD


@contextmanager
def unsplit_backward_refused(schedule: str) -> Generator[None]:
    """Raises `ConfigError` where PyTorch cannot split the backward pass of our layers for zero bubble (2.11 cannot)."""
    try:
        yield
    except RuntimeError as error:
        if "_input_metadata" not in str(error):
            raise
        raise ConfigError(
            f"parallel.schedule: PyTorch {torch.__version__} cannot split the backward pass of these layers for "
            f"{schedule}; use a later version, 1f1b or interleaved"
        ) from error


class Pipeline:
    """An `Executor` (`train/objective.py`) over the pipeline axis. `model` has this rank's modules, by their names in
    the whole model. `timeline` holds the spans of this rank's stages in the newest training step.
    """

    model: Decoder

    def __init__(
        self, model: Decoder, config: ParallelConfig, mesh: Mesh, *, passes: Callable[[Decoder], Decoder]
    ) -> None:
        stages.check_ties(model.config, config)
        self.config = config
        self.mesh = mesh
        self.layers = stages.layers_of_stages(model.config, config)
        if model.adapters.r and not all(self.layers):
            raise ConfigError(
                "parallel.layers_per_stage: a stage without layers would hold only frozen weights, because adapters "
                "are in layers; set it so that every stage has a layer"
            )
        self.owners = stages.rank_of_stage(config)
        self._ends_share_a_weight = model.config.tie_embeddings and self.owners[0] != self.owners[-1]
        # Of the whole model: a stage without an embedding could not tell.
        self.weight_dtype = model.embedding.weight.dtype
        self.stages = [
            ModelStage(model, self.layers[index], index, len(self.owners), passes=passes)
            for index, owner in enumerate(self.owners)
            if owner == mesh.pipeline.rank
        ]
        for stage in self.stages:
            stages.check_blocks(stage.part, config)
        self.model = stages.join([stage.part for stage in self.stages])
        self.timeline = StageTimeline(mesh.world.device)
        self._schedules: dict[tuple[int, torch.Size], Schedule] = {}
        self._microbatches: Sequence[Microbatch] = ()
        self._loss_of: Callable[[Tensor, TokenBatch], Tensor] | None = None

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(len(layers) for layers in self.layers)

    def stage_spans(self) -> list[StageSpan]:
        return self.timeline.spans()

    def num_stages_with(self, name: str) -> int:
        return 2 if name == TIED and self._ends_share_a_weight else 1

    def train(self, parts: Sequence[TokenBatch], loss_of: Callable[[Tensor, TokenBatch], Tensor]) -> None:
        """Runs one step of the schedule. Raises `ConfigError` if it cannot run that many microbatches."""
        # Buffers between stages have one shape, so smaller microbatches get rows of padding.
        num_groups = max(part.num_groups for part in parts)
        self._begin([part.padded(num_groups) for part in parts], loss_of)
        schedule = self._schedule(len(parts), self._microbatches[0][1].input_ids_BT.shape)
        self.timeline.begin()
        with unsplit_backward_refused(self.config.schedule):
            schedule.step(target=torch.arange(len(parts)), return_outputs=False)
        self._microbatches, self._loss_of = (), None

    def finish_gradients(self) -> None:
        """Adds up the gradients of a tied embedding, which the first stage and the last hold."""
        ends = (self.owners[0], self.owners[-1])
        if not self._ends_share_a_weight or self.mesh.pipeline.rank not in ends:
            return
        weight = self.model.get_parameter(TIED)
        if weight.grad is None:
            return
        # Both ends exchange what they have and add it to their own: a sum of two has the same bits in either order.
        own, group = local(weight.grad), self.mesh.pipeline.group
        peer = ends[1] if self.mesh.pipeline.rank == ends[0] else ends[0]
        theirs = torch.empty_like(own)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own.contiguous(), group=group, group_peer=peer),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        own.add_(theirs)

    def evaluate(self, parts: Sequence[TokenBatch], loss_of: Callable[[Tensor, TokenBatch], Tensor]) -> None:
        """Passes hidden states through the stages, part by part; parts may have different numbers of rows."""
        self._begin(parts, loss_of)
        for number, (_, batch) in enumerate(self._microbatches):
            hidden_BTD = sending = None
            for stage in self.stages:
                if not stage.is_first and self.owners[stage.index - 1] != self.mesh.pipeline.rank:
                    shape = self._hidden_shape(batch.input_ids_BT.shape)
                    hidden_BTD = torch.empty(shape, dtype=self.dtype, device=self.mesh.world.device)
                    dist.recv(hidden_BTD, group=self.mesh.pipeline.group, group_src=self.owners[stage.index - 1])
                hidden_BTD = stage.part(*() if stage.is_first else (hidden_BTD,))
                if stage.is_last:
                    self._loss(hidden_BTD, number)
                elif self.owners[stage.index + 1] != self.mesh.pipeline.rank:
                    if sending is not None:
                        sending.wait()
                    sending = dist.isend(
                        hidden_BTD.contiguous(), group=self.mesh.pipeline.group, group_dst=self.owners[stage.index + 1]
                    )
            if sending is not None:
                sending.wait()
        # No backward frees the gathered weights here.
        for stage in self.stages:
            for module in sharded_modules(stage.part):
                module.reshard()

    def _begin(self, parts: Sequence[TokenBatch], loss_of: Callable[[Tensor, TokenBatch], Tensor]) -> None:
        kind, windows = self.config.context_attention, self.model.config.windows
        self._microbatches = [shard_sequence(part, self.mesh.context, kind, windows) for part in parts]
        self._loss_of = loss_of
        for stage in self.stages:
            stage.feed = iter(self._microbatches)

    def _loss(self, output_BTD: Tensor, number: Tensor | int) -> Tensor:
        assert self._loss_of is not None
        return self._loss_of(output_BTD, self._microbatches[int(number)][1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations that are sent between stages."""
        return self.model.ends.stream_dtype or self.weight_dtype

    def _schedule(self, num_microbatches: int, shape: torch.Size) -> Schedule:
        # The buffers between stages depend on the shape; those of the previous shape are freed.
        key = (num_microbatches, shape)
        if key in self._schedules:
            return self._schedules[key]
        stages.check_microbatches(self.config, num_microbatches)
        travels = torch.empty(self._hidden_shape(shape), dtype=self.dtype, device="meta", requires_grad=True)
        # After the final norm the tokens of all tensor ranks have been gathered.
        whole = travels.new_empty((*shape, travels.shape[-1]), requires_grad=True)
        kinds = {
            "forward_one_chunk": "forward",
            "backward_one_chunk": "backward_input" if self.config.schedule == "zero_bubble" else "backward",
            "backward_weight_one_chunk": "backward_weight",
        }
        wrapped_stages = []
        for stage in self.stages:
            wrapped = PipelineStage(
                stage.part,
                stage.index,
                len(self.owners),
                self.mesh.world.device,
                input_args=() if stage.is_first else (travels,),
                output_args=(whole if stage.is_last else travels,),
                group=self.mesh.pipeline.group,
            )
            for method, kind in kinds.items():
                vars(wrapped)[method] = self.timeline.timed(getattr(wrapped, method), stage.index, kind)
            wrapped_stages.append(wrapped)
        # Nothing is scaled: losses are shares of one sum, already divided by the global normalizer.
        loss_fn = self.timeline.timed(self._loss, len(self.owners) - 1, "loss")
        if self.config.schedule in ("gpipe", "1f1b"):
            # 1F1B needs a microbatch for every stage; with fewer of them GPipe stores no more and is as fast.
            enough = num_microbatches >= len(self.owners)
            single = Schedule1F1B if self.config.schedule == "1f1b" and enough else ScheduleGPipe
            built = single(wrapped_stages[0], num_microbatches, loss_fn=loss_fn, scale_grads=False)
        else:
            several = ScheduleZBVZeroBubble if stages.is_v_shaped(self.config) else ScheduleInterleavedZeroBubble
            several = ScheduleInterleaved1F1B if self.config.schedule == "interleaved" else several
            built = several(wrapped_stages, num_microbatches, loss_fn=loss_fn, scale_grads=False)  # pyright: ignore
        self._schedules = {key: built}
        return built

    def _hidden_shape(self, shape: torch.Size) -> tuple[int, int, int]:
        """Returns the shape of the tensor that is sent between stages, for tokens of this shape."""
        num_rows, row_len = shape
        shares_tokens = self.config.sequence_parallel and self.mesh.tensor.size > 1
        row_len = stage_tokens(row_len, self.mesh.tensor.size, sequence_parallel=shares_tokens)
        return num_rows, row_len, self.model.config.model_dim
