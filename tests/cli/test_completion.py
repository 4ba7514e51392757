"""Shell completion, and the help of every command."""

import shutil
import subprocess

import pytest

from modelwright.cli.main import COMMANDS, main

NO_COMPOPT = "compopt() { :; }"
"""It works while a shell completes only."""


def complete(script: str, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in ("modelwright", *words))
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_modelwright; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    lines = f"{script}\n{NO_COMPOPT}\n{ask}"  # by standard input: an argument may have 128 KiB only
    done = subprocess.run(["bash"], input=lines, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_bash_completes_commands_options_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "re") == ["recipes", "requests", "report"]
    assert complete(script, "run", "--dry") == ["--dry-run"]
    assert complete(script, "run", "--sft.precision.pol") == ["--sft.precision.policy"]
    assert "quickstart" in complete(script, "run", "qu")
    assert complete(script, "plan", "mem") == ["memory"]
    assert complete(script, "serve", "--engine.max_num_s") == ["--engine.max_num_seqs"]
    assert complete(script, "explain", "training.gradient_sync.k") == ["training.gradient_sync.kind"]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_help_ends_with_one_example(name: str) -> None:
    text = " ".join(COMMANDS[name].parser().format_help().split())
    assert text.count("example: ") == 1
    example = text.rpartition("example: ")[2]
    assert "modelwright" in example
    assert len(example) < 120
