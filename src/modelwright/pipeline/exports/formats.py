"""The list of the formats in which models are written for other programs."""

from collections.abc import Callable, Mapping

from modelwright.core.extensions import offered
from modelwright.pipeline.exports import gguf, hf, onnx, openvino
from modelwright.pipeline.exports.export import Export

EXPORTS: Mapping[str, Export] = {
    export.name: export for export in (hf.EXPORT, gguf.EXPORT, onnx.EXPORT, openvino.EXPORT)
}
"""The only list of the package's own formats."""

EXPORTS_GROUP = "modelwright.exports"
"""Entry points of other packages: each an `Export`."""


def added_exports() -> dict[str, Callable[[], Export]]:
    """Returns functions that load the formats of other packages, by name. Each raises `ConfigError` if its own is
    broken.
    """
    return offered(EXPORTS_GROUP, Export, taken=tuple(EXPORTS))
