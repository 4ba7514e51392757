"""Pipeline parallelism: each rank of one axis holds some of the layers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.data.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import Mesh


class Pipeline:
    model: Decoder

    def __init__(
        self,
        model: Decoder,
        config: ParallelConfig,
        mesh: Mesh,
        *,
        passes: Callable[[Decoder], Decoder],
        autocast: Callable[[], AbstractContextManager],
    ) -> None:
        raise ConfigError("pipeline: is being built")

    def num_stages_with(self, name: str) -> int: ...

    def finish_gradients(self) -> None: ...

    def train(self, parts: Sequence[TokenBatch], loss_of: Callable[[Tensor, TokenBatch], Tensor]) -> None: ...

    def evaluate(self, parts: Sequence[TokenBatch], loss_of: Callable[[Tensor, TokenBatch], Tensor]) -> None: ...
