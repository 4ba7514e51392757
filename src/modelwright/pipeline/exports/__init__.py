"""Formats of models for other programs, one file each (the two graphs share one); `EXPORTS` lists them."""

from collections.abc import Callable, Mapping

from modelwright.core.extensions import offered
from modelwright.pipeline.exports import gguf, graph, hf
from modelwright.pipeline.exports.export import Export

EXPORTS: Mapping[str, Export] = {
    export.name: export for export in (hf.EXPORT, hf.HUB, gguf.EXPORT, graph.ONNX, graph.OPENVINO)
}
"""The only list of the package's own formats."""

EXPORTS_GROUP = "modelwright.exports"
"""Entry points of other packages: each an `Export`."""


def added_exports() -> dict[str, Callable[[], Export]]:
    """Returns functions that load the formats of other packages, by name. Each raises `ConfigError` if its own is
    broken.
    """
    return offered(EXPORTS_GROUP, Export, taken=tuple(EXPORTS))
