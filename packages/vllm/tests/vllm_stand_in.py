"""A program with the command line and the API of `vllm serve`, for machines without vLLM: our own server and engine on
a Unix socket. It knows the options that the back-end gives and no others.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import uvicorn

from modelwright.infer.engine import EngineConfig
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.load import ModelSource
from modelwright.serve.server import Application

REASON = "ValueError: No available memory for the cache blocks."
TESTS = Path(__file__).parent


def install(folder: Path) -> Path:
    """Write the program `vllm` into a folder."""
    program = folder / "vllm"
    paths = [str(TESTS), *sys.path]
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {paths!r}\nfrom vllm_stand_in import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return program


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    serve = parser.add_subparsers(required=True).add_parser("serve", allow_abbrev=False)
    serve.add_argument("folder", type=Path)
    serve.add_argument("--uds", required=True)
    serve.add_argument("--served-model-name", required=True)
    serve.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"))
    serve.add_argument("--max-model-len", type=int)
    serve.add_argument("--max-num-seqs", type=int, required=True)
    serve.add_argument("--max-logprobs", type=int)
    serve.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    serve.add_argument("--generation-config", choices=("vllm",))
    serve.add_argument("--structured-outputs-config", type=json.loads)
    serve.add_argument("--enable-prompt-tokens-details", action="store_true")
    serve.add_argument("--disable-uvicorn-access-log", action="store_true")
    serve.add_argument("--out-of-memory", action="store_true")
    return parser


async def run(options: argparse.Namespace) -> None:
    engine = EngineConfig(
        max_num_seqs=options.max_num_seqs, enable_prefix_caching=options.enable_prefix_caching, prefill_chunk_size=16
    )
    source, config = ModelSource(name="tiny", folder=options.folder), ServeConfig(engine=engine)
    application = Application(*load_engines(source, config), config, model_name=options.served_model_name)
    await application.start()
    await uvicorn.Server(uvicorn.Config(application.asgi(), uds=options.uds, lifespan="off", log_config=None)).serve()
    await application.close()


def main() -> int:
    options = parser().parse_args()
    print(f"serving with process {os.getpid()}", flush=True)
    if options.out_of_memory:
        print(REASON, "Try increasing gpu_memory_utilization.", file=sys.stderr)
        return 1
    asyncio.run(run(options))
    return 0
