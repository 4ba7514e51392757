"""`modelwright chat`: a model in the terminal."""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.serve import STAGE_HELP, show_remark


def parser() -> argparse.ArgumentParser:
    parser = new_parser("chat", "Talk to a model in the terminal.", example="modelwright chat runs/quickstart")
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--int8", action="store_true", help="take the run's quantized model")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 (the likeliest token) to 2; default: 0.7")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="sample from the likeliest tokens of this weight, at most 1; default: 0.95",
    )
    parser.add_argument("--tools", metavar="FILE", default="", help="JSON file with functions that the model may call")
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        default="{}",
        help="variables of the chat template, such as {enable_thinking: false}",
    )
    return parser


def chat(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    import yaml

    from modelwright.core.config import ConfigError
    from modelwright.data.sources.turns import read_tools
    from modelwright.infer.sequence import SamplingParams
    from modelwright.recipes.models import find
    from modelwright.serve.terminal import chat as talk

    try:
        variables = yaml.safe_load(options.chat_template_kwargs)
        tools = read_tools(Path(options.tools).read_text(encoding="utf-8")) if options.tools else []
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--tools, --chat-template-kwargs: cannot be read ({error}); give JSON") from None
    if not isinstance(variables, dict):
        raise ConfigError("--chat-template-kwargs: is not an object; give {NAME: VALUE}")
    params = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    result = find(options.target, stage=options.stage, int8=options.int8)
    show_remark(result.remark)
    print(f"Model: {result.source.describe()}", flush=True)
    talk(result.source.folder, params, tools=tools, variables=variables)
    return 0


COMMAND = Command(
    name="chat",
    run=chat,
    parser=parser,
    summary="talk to a run's model in the terminal",
    spared=(signal.SIGINT,),  # Ctrl-C ends an answer, not the conversation
)
