"""Converts the state of a run to JSON with names in place of tensors, and back.

Most of the state is the same on all ranks, or follows a parameter. The state of a gradient sync is neither: its
residuals (error feedback) differ from rank to rank, and only their sum over the ranks is meaningful. It is therefore
stored per rank; under another number of ranks the sums are divided again. In it

- a list of tensors with the shapes of this rank's gradients, in their order, follows the parameters into any layout;
- values under a key `shared` are equal on all ranks of the transport;
- all other tensors fit only ranks that hold the same pieces of the same parameters.
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from modelwright.ops.dtensor import as_dtensor_like
from modelwright.train.checkpoint.files import ShardReader, TensorShard, piece_of

_TENSOR, _FLOAT, _PARAMETERS = "$tensor", "$float", "$parameters"
SHARED = "shared"
"""Key in a gradient sync's state whose values are equal on all ranks."""


def split(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with every tensor replaced by its name; the tensors go into `tensors`."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {_TENSOR: name}
    if isinstance(tree, Mapping):
        entries = cast(Mapping[str, Any], tree).items()
        return {key: split(value, f"{name}/{key}" if name else key, tensors) for key, value in entries}
    if isinstance(tree, (list, tuple)):
        return [split(value, f"{name}/{i}", tensors) for i, value in enumerate(cast(Sequence[Any], tree))]
    if isinstance(tree, float) and not math.isfinite(tree):  # JSON has no infinity and no nan
        return {_FLOAT: str(tree)}
    return tree


def join(tree: Any, find: Callable[[str], Any]) -> Any:
    """The inverse of `split`; `find` returns the tensor of a name."""
    if isinstance(tree, dict):
        tree = cast(dict[str, Any], tree)
        for mark in (_TENSOR, _PARAMETERS):
            if set(tree) == {mark}:
                return find(tree[mark])
        if set(tree) == {_FLOAT}:
            return float(tree[_FLOAT])
        return {key: join(value, find) for key, value in tree.items()}
    return [join(value, find) for value in cast(list[Any], tree)] if isinstance(tree, list) else tree


def merge(trees: Sequence[Any]) -> Any:
    """Merges the ranks' trees into one: it has all keys, and the first rank's value where several ranks have one."""
    first = trees[0]
    if _is_leaf(first):
        return first
    trees = [tree for tree in trees if not _is_leaf(tree)]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: merge([tree[key] for tree in trees if key in tree]) for key in keys}


@dataclass(frozen=True)
class Seat:
    """A rank's place in a gradient sync: its number among the ranks that sum, and a hash of its shards."""

    rank: int
    size: int
    layout: int


def seat(rank: int, size: int, gradients: Mapping[str, Tensor]) -> Seat:
    """gradients: the parameters (or tensors laid out like them) in the order of the synchronized gradients."""
    keys = [piece_of(tensor).key(name) for name, tensor in gradients.items()]
    return Seat(rank, size, zlib.crc32(json.dumps(keys).encode()))


def split_transport(
    tree: Any, at: Seat, gradients: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, TensorShard]]:
    """Returns the entry of `state.json` for this rank's gradient sync, and the sync's tensors by name."""
    held = {name: piece_of(tensor) for name, tensor in gradients.items()}
    pieces: dict[str, TensorShard] = {}

    def walk(node: Any, path: str) -> Any:
        values = cast(Sequence[Any], node) if isinstance(node, (list, tuple)) else ()
        # A list follows the parameters if it has a tensor of each gradient's shape, in their order.
        if (
            0 < len(values) == len(held)
            and all(isinstance(value, Tensor) for value in values)
            and all(value.shape == piece.values.shape for value, piece in zip(values, held.values(), strict=True))
        ):
            for value, (name, place) in zip(values, held.items(), strict=True):
                pieces[_name(path, at.rank, name)] = TensorShard(value, place.box, place.shape)
            return {_PARAMETERS: path}
        if isinstance(node, Tensor):
            pieces[_name(path, at.rank, str(at.layout))] = piece_of(node)
            return {_TENSOR: path}
        if isinstance(node, Mapping):
            return {key: walk(value, f"{path}/{key}") for key, value in cast(Mapping[str, Any], node).items()}
        if isinstance(node, (list, tuple)):
            return [walk(value, f"{path}/{i}") for i, value in enumerate(values)]
        return split(node, path, {})

    return {"rank": at.rank, "size": at.size, "layout": at.layout, "tree": walk(tree, "")}, pieces


class UnplaceableError(Exception):
    """A gradient sync's state does not fit the layout under which it is loaded."""


def join_transport(
    records: Sequence[Mapping[str, Any]], reader: ShardReader, at: Seat, gradients: Mapping[str, Tensor]
) -> Any:
    """The state for this rank's gradient sync. Raises `UnplaceableError`."""
    size = records[0]["size"]
    # Best is the record of the same rank under the same layout; then one of the same layout, then of the same rank.
    alike = [record for record in records if record["layout"] == at.layout]
    same = [record for record in alike or records if record["rank"] == at.rank]
    record = (same or alike or records)[0]

    def gather(path: str, suffix: str, read: Callable[[str], Tensor]) -> Tensor:
        if size == at.size or SHARED in path.split("/"):
            return read(_name(path, at.rank, suffix))
        # Under another number of ranks each takes an equal part of the sum of all residuals, which alone matters.
        values = [read(_name(path, rank, suffix)) for rank in range(size)]
        return sum(values[1:], start=values[0]) / at.size if values[0].is_floating_point() else values[0]

    def find(path: str) -> Any:
        node = record["tree"]
        for key in path.split("/")[1:]:
            node = cast(list[Any], node)[int(key)] if isinstance(node, list) else node[key]
        if next(iter(node)) == _PARAMETERS:
            return [
                gather(path, name, lambda full, like=like: reader.read(full, piece_of(like).box))
                for name, like in gradients.items()
            ]
        if not alike:
            raise UnplaceableError(path)
        return gather(path, str(at.layout), reader.read)

    return join(record["tree"], find)


def optimizer_state(tree: Mapping[str, Any], reader: ShardReader, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The optimizer's state of the parameters in `weights`, in host memory, with tensors laid out like them."""

    def place(full: str, parameter: Tensor) -> Tensor:
        if reader.shape(full) != tuple(parameter.shape):
            return reader.read(full)
        return as_dtensor_like(parameter, reader.read(full, piece_of(parameter).box))

    return {
        name: join(tree[name], lambda full, parameter=parameter: place(full, parameter))
        for name, parameter in weights.items()
        if name in tree
    }


def _is_leaf(tree: Any) -> bool:
    return not isinstance(tree, dict) or any(key.startswith("$") for key in cast(dict[str, Any], tree))


def _name(path: str, rank: int, suffix: str) -> str:
    return f"transport/{'all' if SHARED in path.split('/') else rank}{path}/{suffix}"
