"""Which layer of a teacher each layer of a student is compared with."""

from collections.abc import Sequence

from modelwright.core.errors import ConfigError


def even_layer_map(num_layers: int, num_teacher_layers: int) -> tuple[int, ...]:
    """The teacher's layer for each of the student's: both end with their last, equally far apart (TinyBERT)."""
    step = num_teacher_layers / num_layers
    return tuple(max(0, round((layer + 1) * step) - 1) for layer in range(num_layers))


def layer_pairs(layer_map: Sequence[int], num_layers: int, num_teacher_layers: int) -> list[tuple[int, int]]:
    """The layers of student and teacher that are compared. layer_map: for each layer of the student that of the
    teacher, -1 for none; empty maps them evenly. Raises `ConfigError` for an impossible map.
    """
    layers = layer_map or even_layer_map(num_layers, num_teacher_layers)
    if len(layers) != num_layers or not all(-1 <= layer < num_teacher_layers for layer in layers):
        raise ConfigError(
            f"layer_map: needs a layer of the teacher (0 to {num_teacher_layers - 1}, or -1 for none) for each of the "
            f"student's {num_layers} layers, got {list(layers)}"
        )
    if max(layers) < 0:
        raise ConfigError("layer_map: maps no layer; give one of them a layer of the teacher")
    return [(own, layer) for own, layer in enumerate(layers) if layer >= 0]
