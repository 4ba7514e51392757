"""Tensor parallelism: the ranks of one axis share every layer's heads, FFN columns and the vocabulary."""

from torch.distributed.device_mesh import DeviceMesh

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder


def shard_layers(model: Decoder, tensor: DeviceMesh, *, sequence_parallel: bool) -> Decoder:
    raise ConfigError("tensor: is being built")
