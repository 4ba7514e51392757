"""Optional libraries: the modules that each extra brings, and the one line about those that are not installed.

pyproject.toml has the versions. A module of an extra is imported where it is used, never at the top of a module that
the core loads. Extras that a single file needs (`gguf`, `otel`) are named in that file.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from modelwright.core.config import ConfigError

MODULES: Mapping[str, tuple[str, ...]] = {
    "clean": ("resiliparse", "fastwarc", "rensa", "phonenumbers", "stdnum", "py3langid", "sklearn", "scipy"),
    "completion": ("shtab",),
    "hub": ("huggingface_hub",),
    "images": ("PIL", "sklearn", "scipy"),
    "report": ("matplotlib",),
    "serve": ("starlette", "uvicorn", "pydantic", "prometheus_client", "openai", "scipy"),
    "tensorboard": ("tensorboardX",),
}


def is_installed(extra: str) -> bool:
    """Returns True if every module of the extra can be found. Imports none of them."""
    return all(find_spec(module) is not None for module in MODULES[extra])


def install_line(*extras: str) -> str:
    """Returns the command that installs the extras."""
    return f"pip install 'modelwright[{','.join(dict.fromkeys(extras))}]'"


def require(needs: Mapping[str, str]) -> None:
    """Raises one `ConfigError` for all extras that are not installed. needs: the extra, by the setting, command or file
    that needs it.
    """
    lacking = {name: extra for name, extra in needs.items() if not is_installed(extra)}
    if lacking:
        first, *others = lacking
        also = f" (as do {', '.join(others)})" if len(others) > 1 else f" (as does {others[0]})" if others else ""
        text = f"{first}: needs packages that are not installed{also}"
        raise ConfigError(f"{text}; {install_line(*sorted(lacking.values()))}", code="missing")
