"""`modelwright completion`: static shell completion of commands, options and settings."""

import argparse
from collections.abc import Mapping, Sequence

from modelwright.cli import augment, clean, commands, config, lr_find, plan, run
from modelwright.cli.parsers import new_parser

SHELLS = ("bash", "zsh", "fish")
_WITH_SETTINGS = ("run", "config", "lr-find", "explain")
"""Commands that take the settings of a run, as options or (explain) as a word."""


def completion_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "completion",
        "Print a script that completes commands, options and settings in a shell.",
        example='eval "$(modelwright completion bash)"',
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


PARSERS = {
    "run": run.parser,
    "launch": run.launch_parser,
    "clean": clean.parser,
    "augment": augment.parser,
    "recipes": commands.recipes_parser,
    "config": config.config_parser,
    "explain": config.explain_parser,
    "doctor": commands.doctor_parser,
    "plan": plan.parser,
    "lr-find": lr_find.parser,
    "serve": commands.serve_parser,
    "chat": commands.chat_parser,
    "export": commands.export_parser,
    "report": commands.report_parser,
    "completion": completion_parser,
}
"""The parsers of the package's own commands."""


def completion(words: Sequence[str]) -> int:
    """`modelwright completion`"""
    shell = completion_parser().parse_args(words).shell
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](completions()), end="")
    return 0


def completions() -> dict[str, list[str]]:
    """The words that may follow each command."""
    from modelwright.cli.config import run_settings
    from modelwright.cli.overrides import all_paths
    from modelwright.pipeline.config import TRAININGS
    from modelwright.recipes.load import RECIPES
    from modelwright.serve.config import ServeConfig

    keys = [setting.key for setting in run_settings()]
    inherited = [key.removeprefix("training.") for key in keys if key.startswith("training.")]
    keys += [f"{stage}.{key}" for stage in TRAININGS for key in inherited]
    result = {name: _options(make()) for name, make in PARSERS.items()}
    for name in _WITH_SETTINGS:
        result[name] += keys if name == "explain" else [*RECIPES, *(f"--{key}" for key in keys)]
    result["serve"] += [f"--{key}" for key in all_paths(ServeConfig)]
    return result | {"prove": ["--list", "--judge", "--all", "--quick"]}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Options of a parser and of its subcommands, and the names of these."""
    words: list[str] = []
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action.choices, Mapping):
            for name, subcommand in action.choices.items():
                words += [name, *_options(subcommand)]
        elif action.choices and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    return list(dict.fromkeys(words))


def bash(words: Mapping[str, Sequence[str]]) -> str:
    """Complete file names where none of our words fits."""
    cases = "\n".join(f'        {name}) words="{" ".join(of)}" ;;' for name, of in words.items())
    return f"""_modelwright() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _modelwright modelwright
"""


def zsh(words: Mapping[str, Sequence[str]]) -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + bash(words)


def fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c modelwright -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    lines += [
        f"complete -c modelwright -n '__fish_seen_subcommand_from {name}' -a '{' '.join(of)}'"
        for name, of in words.items()
    ]
    return "\n".join(lines) + "\n"
