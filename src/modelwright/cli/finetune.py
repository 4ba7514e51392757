"""`modelwright finetune`: makes a fine-tuned and evaluated model from a model folder and examples."""

import argparse
from collections.abc import Sequence

from modelwright.cli.config import setting_names
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.run import add_run_options, carry_out
from modelwright.cli.show import print_shown
from modelwright.core.config import ConfigError, named_stages, read_overrides, split_settings

_FLAGS = ("lora", "stages", "run-dir", "dry-run", "restart", "nproc", "board", "help")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "finetune",
        "Fine-tune a model on your own examples: read and clean them, hold some out, train, compare the model before "
        "and after on what was held out, and write a report. The result is a folder that `transformers` loads and "
        "`modelwright chat` and `modelwright serve` take. The same command resumes what was cut off.",
        example="modelwright finetune models/SmolLM2-135M-Instruct support.jsonl --minutes 5 --sft.learning_rate 3e-4",
        usage="modelwright finetune MODEL DATA [DATA ...] [--lora] [--stages A,B] [--run-dir DIR] [--minutes N] "
        "[--dry-run] [--restart] [--nproc N] [--a.b VALUE ...]",
        notes=(
            "MODEL is a Hugging Face folder or a run; DATA are files, folders or globs with records in any form of\n"
            "docs/data.md. Settings are those of the recipe `finetune` (modelwright run finetune --init-from MODEL):\n"
            "  --sft.learning_rate 3e-4 --sft.num_epochs 2 --sft.neftune_noise_alpha 5 --pack.chat_loss last_answer\n"
        ),
    )
    parser.add_argument("target", metavar="MODEL", help="a Hugging Face folder, a run directory, or a run's name")
    parser.add_argument("sources", metavar="DATA", nargs="+", help="examples in a form of data.sources (docs/data.md)")
    parser.add_argument(
        "--lora", action="store_true", help="train low-rank adapters only: --sft.lora.r 16 --sft.learning_rate 2e-4"
    )
    return add_run_options(parser)


def finetune(words: Sequence[str]) -> int:
    leading, own, settings = split_settings(words, _FLAGS)
    # The parser would report only the missing DATA, and not how the command is written.
    if len(leading) < 2 and "--help" not in own:
        raise ConfigError("finetune: name a model and its data: modelwright finetune MODEL DATA [DATA ...]")
    options = parser().parse_args([*leading, *own])
    from modelwright.pipeline.run_config import run_schema
    from modelwright.recipes.load import finetune_request

    only = named_stages(options.stages)
    overrides = read_overrides(run_schema(), settings, _FLAGS)
    request = finetune_request(
        options.target,
        options.sources,
        overrides,
        options.run_dir,
        lora=options.lora,
        only=only,
        num_processes=options.nproc,
    )
    exit_code = carry_out(request, options, line=["finetune", *words], only=only)
    if options.dry_run:
        from pathlib import Path

        from modelwright.pipeline.stages.clean import CLEAN
        from modelwright.pipeline.stages.pack import PACK
        from modelwright.recipes.show import show_examples

        # The settings of the run decide what is read, cleaned, truncated and learned.
        config = request.config
        packing = config.section(PACK)
        folder, data, clean = Path(config.init_from), config.data, config.section(CLEAN)
        print()
        print_shown(show_examples(folder, data, clean, rows=1, seq_len=packing.seq_len, loss=packing.chat_loss))
    return exit_code


COMMAND = Command(
    name="finetune",
    run=finetune,
    parser=parser,
    settings=setting_names,
    summary="fine-tune a model folder on your own examples",
    is_resumable=True,
)
