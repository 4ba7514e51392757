"""Structured pruning: makes a smaller decoder from the layers, heads and feed-forward channels of a larger one.

Depth: evenly spaced layers, the first and the last among them (Sanh et al. 2019, DistilBERT). Width: the parts that
contribute most to the output of their projection. Channel c of a projection y = W x contributes sqrt(E[x_c^2]) *
|W[:, c]|
(Sun et al. 2024, Wanda, arXiv 2306.11695, section 3, summed over outputs); a head is the sum over its channels, a
key/value head that of its query heads. Without activations E[x_c^2] is the squared norm of the weights that make x_c.

Legend: D model width, F feed-forward channels, H query heads, K key/value heads, d head width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from modelwright.core.config import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Block, Decoder, Linear, ModelConfig

Moments = Mapping[str, Tensor]
"""E[x_c^2] of the inputs of output and down projections, by their names."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Parts of one layer that are kept, in order: the layer, its query heads, key/value heads and feed-forward
    channels.
    """

    layer: int
    heads: Sequence[int]
    kv_heads: Sequence[int]
    channels: Sequence[int]


def prune(teacher: Decoder, smaller: ModelConfig, moments: Moments) -> Decoder:
    """Returns a decoder of the shape `smaller`, on the CPU, with weights of `teacher`. moments: from `input_moments`,
    or empty to judge by weights alone. Raises `ConfigError` for a shape that does not fit into the teacher's.
    """
    check_part(smaller, teacher.config)
    config, chosen = teacher.config, list[Kept]()
    per_group = config.num_heads // config.num_kv_heads
    for layer in even_layers(config, smaller.num_layers):
        block = teacher.blocks[str(layer)]
        assert isinstance(block, Block)
        attention, ffn, place = block.attention, block.ffn, f"blocks.{layer}"
        # Without activations: the squared norm of the weights that make a channel stands for its second moment.
        value_KX = attention.v_proj.weight.detach().double().square().sum(dim=1).view(config.num_kv_heads, -1)
        of_weights = value_KX.repeat_interleave(per_group, dim=0).flatten()
        scores_HX = _scores(attention.o_proj, moments.get(f"{place}.attention.o_proj", of_weights)).view(
            config.num_heads, -1
        )
        scores_KG = scores_HX.sum(dim=1).view(config.num_kv_heads, per_group)
        # Heads are compared within their group and groups by their kept heads, because all key/value heads of the
        # smaller model must serve equally many query heads.
        best_KG = scores_KG.topk(smaller.num_heads // smaller.num_kv_heads, dim=1)
        kv_heads = sorted(best_KG.values.sum(dim=1).topk(smaller.num_kv_heads).indices.tolist())
        heads = [kv * per_group + one for kv in kv_heads for one in sorted(best_KG.indices[kv].tolist())]
        made = [linear.weight.detach().double().square().sum(dim=1) for linear in (ffn.gate_proj, ffn.up_proj)]
        scores_F = _scores(ffn.down_proj, moments.get(f"{place}.ffn.down_proj", made[0] * made[1]))
        channels = sorted(scores_F.topk(smaller.ffn_dim).indices.tolist())
        chosen.append(Kept(layer=layer, heads=heads, kv_heads=kv_heads, channels=channels))
    result = Decoder(pruned_config(teacher.config, smaller, [kept.layer for kept in chosen]))
    weights = dict(teacher.named_parameters())
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            parameter.copy_(_part_of(name, weights, chosen, teacher.config))
    return result.to(teacher.head_weight.dtype)


def pruned_config(teacher: ModelConfig, smaller: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """Returns the teacher's configuration with a smaller shape; windows and layers without positions follow their
    layers.
    """

    def moved(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new for new, layer in enumerate(layers) if layer in old)

    attention = teacher.attention
    # A window without layers would be refused, so it goes with the last of them.
    window_layers = moved(attention.window_layers)
    attention = replace(
        attention,
        window_layers=window_layers,
        window=attention.window if window_layers else 0,
        layers_without_rope=moved(attention.layers_without_rope),
    )
    names = ("num_layers", "num_heads", "num_kv_heads", "ffn_dim")
    return replace(teacher, attention=attention, **{name: getattr(smaller, name) for name in names})


def check_part(smaller: ModelConfig, teacher: ModelConfig) -> None:
    """Raise `ConfigError` with the first dimension in which `smaller` does not fit into `teacher`."""
    for name in ("model_dim", "head_dim", "vocab_size"):
        if getattr(smaller, name) != getattr(teacher, name):
            raise ConfigError(
                f"{name}: {getattr(smaller, name)} differs from the teacher's {getattr(teacher, name)}, and pruning "
                "keeps it; leave it at 0 or start from scratch"
            )
    for name in ("num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
        if getattr(smaller, name) > getattr(teacher, name):
            raise ConfigError(
                f"{name}: {getattr(smaller, name)} is more than the teacher's {getattr(teacher, name)}, and pruning "
                "adds nothing; choose at most the teacher's"
            )
    groups = [one.num_heads // one.num_kv_heads for one in (smaller, teacher)]
    if groups[0] > groups[1]:
        raise ConfigError(
            f"num_kv_heads: with {smaller.num_heads} query heads each of {smaller.num_kv_heads} key/value heads would "
            f"serve {groups[0]}, and the teacher's serve {groups[1]}; keep more key/value heads"
        )


def even_layers(teacher: ModelConfig, num_layers: int) -> list[int]:
    """Lists evenly spaced layers of the teacher, its first and last among them; of a single one, the first."""
    last = teacher.num_layers - 1
    return [round(place * last / max(1, num_layers - 1)) for place in range(num_layers)]


@torch.no_grad()
def input_moments(teacher: Decoder, batches: Iterable[TokenBatch]) -> Moments:
    """Measures E[x_c^2] over the tokens of some rows, without padding, for the choice of heads and channels."""
    projections = teacher.projections()
    names = [name for name in projections if name.endswith(("o_proj", "down_proj"))]
    sums = {name: torch.zeros(projections[name].in_features, dtype=torch.float64) for name in names}
    count = 0
    for batch in batches:
        real_BT = batch.segments_BT >= 0

        def add(name: str, module: nn.Module, inputs: tuple[Tensor, ...], real_BT: Tensor = real_BT) -> None:
            sums[name] += inputs[0][real_BT].double().square().sum(dim=0)

        hooks = [projections[name].register_forward_pre_hook(partial(add, name)) for name in names]
        try:
            teacher(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT, teacher.config.windows))
        finally:
            for hook in hooks:
                hook.remove()
        count += int(real_BT.sum())
    return {name: total / max(1, count) for name, total in sums.items()}


def _scores(linear: Linear, moments_C: Tensor) -> Tensor:
    """Squared contribution of each input channel."""
    return moments_C.double() * linear.weight.detach().double().square().sum(dim=0)


def _part_of(name: str, weights: Mapping[str, Tensor], chosen: Sequence[Kept], config: ModelConfig) -> Tensor:
    """Returns the part of the teacher's weight that a parameter of the pruned model takes."""
    if not name.startswith("blocks."):
        return weights[name]
    _, place, rest = name.split(".", 2)
    kept = chosen[int(place)]
    weight = weights[f"blocks.{kept.layer}.{rest}"]
    heads, kv_heads = (
        (torch.tensor(numbers)[:, None] * config.head_dim + torch.arange(config.head_dim)).flatten()
        for numbers in (kept.heads, kept.kv_heads)
    )
    channels = torch.tensor(kept.channels)
    gates = heads if config.attention_gate == "element" else torch.tensor(kept.heads)
    rows = {
        "output_gate": gates,
        "head_router": torch.tensor(kept.kv_heads),
        "q_proj": heads,
        "k_proj": kv_heads,
        "v_proj": kv_heads,
        "gate_proj": channels,
        "up_proj": channels,
    }
    columns = {"o_proj": heads, "down_proj": channels}
    projection, _, kind = rest.rpartition(".")
    projection = projection.rpartition(".")[2]
    if projection in rows:
        return weight[rows[projection]]
    return weight[:, columns[projection]] if projection in columns and kind == "weight" else weight
