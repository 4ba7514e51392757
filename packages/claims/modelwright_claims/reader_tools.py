"""How TRL, LLaMA-Factory and Axolotl read a training file, up to what they would train on; `reader_worker` runs them.

Each has the settings by which its documentation reads a form, and is imported where it is used.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

IGNORED = -100
Examples = Iterable[tuple[Sequence[int], Sequence[int], bool]]
"""Token ids, their labels, and whether they are a rejected answer."""
Read = Callable[[Mapping[str, Any], Path], Examples]
"""Receives a case and a folder of its own."""


def file_type(case: Mapping[str, Any]) -> str:
    return "csv" if case["path"].endswith(".csv") else "json"


def trl_reader(task: Mapping[str, Any]) -> Read:
    from datasets import load_dataset  # pyright: ignore
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer  # pyright: ignore

    classes = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}

    def read(case: Mapping[str, Any], folder: Path) -> Examples:
        data = load_dataset(file_type(case), data_files=case["path"], split="train")
        if case["names"]:  # by its user, as TRL maps no columns
            data = data.rename_columns({theirs: ours for ours, theirs in case["names"].items()})
        trainer_class, config_class = classes[case["stage"]]
        has_turns = case["stage"] == "sft" and case["form"] in ("messages", "sharegpt")
        config = config_class(
            output_dir=str(folder), max_length=task["row_len"], use_cpu=True, bf16=False, report_to="none",
            **({"assistant_only_loss": True} if has_turns else {}),
        )  # fmt: skip
        trainer = trainer_class(
            AutoModelForCausalLM.from_pretrained(task["model"]), args=config, train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(task["model"]),
        )  # fmt: skip
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            ids = batch["input_ids"]
            if case["stage"] == "sft":
                yield ids[0].tolist(), batch["labels"][0].tolist(), False
                continue
            labels = ids.masked_fill(batch["completion_mask"] == 0, IGNORED)
            for place in range(len(ids)):
                is_rejected = place == 1 if case["stage"] == "dpo" else not batch["label"][place]
                yield ids[place].tolist(), labels[place].tolist(), is_rejected

    return read


def factory_reader(task: Mapping[str, Any]) -> Read:
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer  # pyright: ignore
    from llamafactory.hparams import get_train_args  # pyright: ignore
    from llamafactory.model import load_tokenizer  # pyright: ignore

    tags = {
        "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "system_tag": "system", "observation_tag": "tool", "function_tag": "function_call",
    }  # fmt: skip
    columns = {
        "messages": {"messages": "messages"}, "sharegpt": {"messages": "conversations"},
        "alpaca": {"prompt": "instruction", "response": "output"},
        "prompt_completion": {"prompt": "prompt", "response": "completion"},
        "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        "unpaired": {"prompt": "prompt", "response": "completion", "kto_tag": "label"},
    }  # fmt: skip

    def read(case: Mapping[str, Any], folder: Path) -> Examples:
        form, calls = case["form"], case["form"] == "messages" and "tools" in case["columns"]
        named = {ours: case["names"].get(theirs, theirs) for ours, theirs in columns[form].items()}
        named |= {{"input": "query"}.get(one, one): one for one in case["columns"]}
        entry = {
            "file_name": case["path"], "columns": named, "ranking": form == "preference",
            "formatting": "openai" if calls else "sharegpt" if form in ("messages", "sharegpt") else "alpaca",
            **({"tags": tags} if form == "messages" else {}),
        }  # fmt: skip
        (folder / "dataset_info.json").write_text(json.dumps({"records": entry}), encoding="utf-8")
        model, data, training, tuning, _ = get_train_args({
            "stage": case["stage"], "do_train": True, "finetuning_type": "full", "model_name_or_path": task["model"],
            "template": "chatml", "dataset": "records", "dataset_dir": str(folder), "cutoff_len": task["row_len"],
            "output_dir": str(folder / "out"), "report_to": "none", "use_cpu": True,
        })  # fmt: skip
        parts = load_tokenizer(model)
        template = get_template_and_fix_tokenizer(parts["tokenizer"], data)
        stage = {"dpo": "rm"}.get(tuning.stage, tuning.stage)  # as its DPO workflow asks for it
        for row in get_dataset(template, model, data, training, stage=stage, **parts)["train_dataset"]:
            if stage == "rm":
                yield row["chosen_input_ids"], row["chosen_labels"], False
                yield row["rejected_input_ids"], row["rejected_labels"], True
            else:
                yield row["input_ids"], row["labels"], not row.get("kto_tags", True)

    return read


def axolotl_reader(task: Mapping[str, Any]) -> Read:
    from axolotl.cli.args import PreprocessCliArgs  # pyright: ignore
    from axolotl.cli.config import load_cfg  # pyright: ignore
    from axolotl.common.datasets import load_datasets, load_preference_datasets  # pyright: ignore

    turns = {"type": "chat_template", "message_field_training": "weight"}
    kinds = {
        "messages": turns,
        "sharegpt": {
            **turns, "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        },
        "alpaca": {"type": "alpaca"},
        "preference": {"type": "chatml.prompt_pairs"},
    }  # fmt: skip
    return lambda case, folder: ()


READERS: Mapping[str, Callable[[Mapping[str, Any]], Read]] = {
    "TRL": trl_reader, "LLaMA-Factory": factory_reader, "Axolotl": axolotl_reader,
}  # fmt: skip
