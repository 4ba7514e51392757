"""The Dockerfile: the package, and the model and adapters as they are now."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from modelwright.core.checkout import CHECKOUT_FILES, PINNED_PYTHON, source_checkout
from modelwright.serve.manifests.deployment import HEADER, MODEL_PATH, PORT, Deployment

USER_ID = 10_001
"""Who the server is in the container; no user of the machine's."""

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch without CUDA is."""


def contexts(deployment: Deployment) -> dict[str, Path]:
    """BuildKit's named contexts: folders that the Dockerfile copies from, so that no model is copied beside it.

    Raises `ConfigError` where this package has no source tree to install from.
    """
    named = {context_name(path): folder for path, folder in deployment.folders.items()}
    return named | {"source": source_checkout("--for")}


def context_name(path: str) -> str:
    """`/model` is `model`, `/adapters/1` is `adapters-1`."""
    return path.strip("/").replace("/", "-")


def dockerfile(deployment: Deployment) -> str:
    """Its text. Raises `ConfigError` where this package has no source tree to install from."""
    extras = f"[{','.join(deployment.extras)}]" if deployment.extras else ""
    install = 'pip install --no-cache-dir --extra-index-url "$TORCH_INDEX"'
    copies = [f"COPY --from={context_name(path)} --chmod=755 . {path}" for path in deployment.folders]
    lines = [
        "# syntax=docker/dockerfile:1",
        HEADER.rstrip("\n"),
        f"# Build with the named contexts {', '.join(contexts(deployment))}.",
        f"FROM python:{PINNED_PYTHON}-slim",
        f"ARG TORCH_INDEX={TORCH_INDEX}",
        f"COPY --from=source {' '.join(CHECKOUT_FILES)} /source/",
        "COPY --from=source src /source/src",
        f'RUN {install} -c /source/constraints.txt "/source{extras}" && rm -rf /source',
        f"RUN useradd --uid {USER_ID} --no-create-home --shell /usr/sbin/nologin modelwright",
        *copies,
        "ENV PYTHONUNBUFFERED=1",
        f"USER {USER_ID}:{USER_ID}",
        f"EXPOSE {PORT}",
        "STOPSIGNAL SIGTERM",
        f'ENTRYPOINT ["modelwright", "serve", "{MODEL_PATH}"]',
    ]
    return "\n".join(lines) + "\n"


def build_command(image: str, named: Mapping[str, Path]) -> str:
    """A command that builds the image from the folder of the Dockerfile."""
    options = " ".join(f"--build-context {shlex.quote(f'{name}={path}')}" for name, path in named.items())
    return f"docker build {options} -t {shlex.quote(image)} ."
