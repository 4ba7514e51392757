"""Sub-networks that share the weights of a larger model: views of its parameters in a decoder of a smaller shape.

The first layers, the first channels of the residual stream, the first heads and the first units of each feed-forward
layer (Cai et al. 2020, Once-for-All). Keys and values of a group of heads are the means of those of its heads, as in
section 2.1 of Ainslie et al. 2023; one gate for a head is that of the head's first element.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder


def subnetwork(model: Decoder, shape: ModelConfig) -> Decoder:
    """A decoder of this shape whose weights are functions of those of `model`, with gradients. It is valid until they
    change. model: multi-head attention, at least as large as `shape` in everything, with a gate if `shape` has one.
    """
    with torch.device("meta"):
        network = Decoder(shape)
    names = [name for name, _ in network.named_parameters()]
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = network.get_submodule(owner)
        weight = _shared(name, model.get_parameter(name), model.config, shape)
        assert weight.shape == module.get_parameter(leaf).shape, (name, weight.shape)
        del module._parameters[leaf]  # pyright: ignore[reportPrivateUsage]  # so that a plain tensor may take its place
        setattr(module, leaf, weight)
    network.embedding_hooks = model.embedding_hooks
    return network.train(model.training)


def _shared(name: str, weight: Tensor, large: ModelConfig, small: ModelConfig) -> Tensor:
    """The part of a parameter of the large model that is the parameter of the same name in the small one."""
    heads_dim = small.num_heads * small.head_dim
    parts: dict[str, Callable[[], Tensor]] = {
        "embedding.weight": lambda: weight[:, : small.model_dim],
        "head.weight": lambda: weight[:, : small.model_dim],
        "q_proj.weight": lambda: weight[:heads_dim, : small.model_dim],
        "q_proj.bias": lambda: weight[:heads_dim],
        "k_proj.weight": lambda: _pooled(weight, small)[:, : small.model_dim],
        "k_proj.bias": lambda: _pooled(weight, small),
        "v_proj.weight": lambda: _pooled(weight, small)[:, : small.model_dim],
        "v_proj.bias": lambda: _pooled(weight, small),
        "o_proj.weight": lambda: weight[: small.model_dim, :heads_dim],
        "output_gate.weight": lambda: _gates(weight, large, small)[:, : small.model_dim],
        "q_norm.weight": lambda: weight,
        "k_norm.weight": lambda: weight,
        "gate_proj.weight": lambda: weight[: small.ffn_dim, : small.model_dim],
        "gate_proj.bias": lambda: weight[: small.ffn_dim],
        "up_proj.weight": lambda: weight[: small.ffn_dim, : small.model_dim],
        "up_proj.bias": lambda: weight[: small.ffn_dim],
        "down_proj.weight": lambda: weight[: small.model_dim, : small.ffn_dim],
    }
    ending = ".".join(name.split(".")[-2:])
    return parts.get(ending, lambda: weight[: small.model_dim])()  # the rest has the width of the residual stream


def _pooled(weight: Tensor, small: ModelConfig) -> Tensor:
    """Keys or values of the first heads, the mean of each group: [heads x d, ...] -> [groups x d, ...]."""
    own = weight[: small.num_heads * small.head_dim]
    groups = own.unflatten(0, (small.num_kv_heads, small.num_heads // small.num_kv_heads, small.head_dim))
    return groups.mean(1).flatten(0, 1)


def _gates(weight: Tensor, large: ModelConfig, small: ModelConfig) -> Tensor:
    """Gates of the first heads, of each element or of the head's first one."""
    if large.attention_gate == small.attention_gate:
        return weight[: small.gate_dim]
    return weight.unflatten(0, (large.num_heads, large.head_dim))[: small.num_heads, 0]


def containing_shape(largest: ModelConfig, gates: Sequence[str]) -> ModelConfig:
    """The shape whose sub-networks a search needs. largest: in all sizes; gates: the kinds that candidates have."""
    if largest.head_budget < 1.0:
        raise ConfigError(
            "model.head_budget: sub-networks with shared weights have no router of heads; set it to 1, or choose a "
            "strategy that trains each candidate"
        )
    gate = next((kind for kind in ("element", "head") if kind in gates), "none")
    return replace(largest, num_kv_heads=largest.num_heads, attention_gate=gate)
