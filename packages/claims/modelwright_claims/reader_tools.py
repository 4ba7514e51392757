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
Trainers = Mapping[str, tuple[Any, Any]]
"""Classes of trainers and their settings by stage."""


def file_type(case: Mapping[str, Any]) -> str:
    return "csv" if case["path"].endswith(".csv") else "json"


def trl_trainers() -> Trainers:
    """Imported before the forks, because it takes longer than to read a file."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer  # pyright: ignore

    return {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}


def trl_examples(
    trainers: Trainers, stage: str, task: Mapping[str, Any], data: Any, folder: Path, **settings: Any
) -> Examples:
    """What TRL's trainer of a stage gives its model of each record of a data set."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer_class, config_class = trainers[stage]
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(task["model"]), train_dataset=data,
        args=config_class(
            output_dir=str(folder / "trl"), max_length=task["row_len"], use_cpu=True, bf16=False, report_to="none",
            **settings,
        ),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
    )  # fmt: skip
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        ids = batch["input_ids"]
        if stage == "sft":
            yield ids[0].tolist(), batch["labels"][0].tolist(), False
            continue
        labels = ids.masked_fill(batch["completion_mask"] == 0, IGNORED)
        for place in range(len(ids)):  # of a pair, the chosen one comes first
            is_rejected = place == 1 if stage == "dpo" else not batch["label"][place]
            yield ids[place].tolist(), labels[place].tolist(), is_rejected


def trl_reader(task: Mapping[str, Any]) -> Read:
    from datasets import load_dataset  # pyright: ignore

    trainers = trl_trainers()

    def read(case: Mapping[str, Any], folder: Path) -> Examples:
        data = load_dataset(file_type(case), data_files=case["path"], split="train")
        if case["names"]:  # by its user, as TRL maps no columns
            data = data.rename_columns({theirs: ours for ours, theirs in case["names"].items()})
        has_turns = case["stage"] == "sft" and case["form"] in ("messages", "sharegpt")
        own = {"assistant_only_loss": True} if has_turns else {}
        yield from trl_examples(trainers, case["stage"], task, data, folder, **own)

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
    from axolotl.cli.config import load_cfg  # pyright: ignore
    from axolotl.common.datasets import load_datasets, load_preference_datasets  # pyright: ignore
    from axolotl.utils.dict import DictDefault  # pyright: ignore

    trainers, turns = trl_trainers(), {"type": "chat_template", "message_field_training": "weight"}
    mapped = {"field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}}
    labeled = {"field_prompt": "prompt", "field_completion": "completion", "field_label": "label"}
    types: Mapping[str, Mapping[str, Any]] = {
        "messages": turns, "sharegpt": {**turns, **mapped}, "alpaca": {"type": "alpaca"},
        "preference": {"type": "chatml.prompt_pairs"},
        "unpaired": {"type": {**labeled, "prompt_format": "{prompt}", "completion_format": "{completion}"}},
    }  # fmt: skip

    def read(case: Mapping[str, Any], folder: Path) -> Examples:
        form, names = case["form"], {"prompt": "prompt", "completion": "completion", **case["names"]}
        own = {"field_instruction": names["prompt"], "field_output": names["completion"]}
        entry = types.get(form) or {"type": {**own, "format": "{instruction}\n", "no_input_format": "{instruction}\n"}}
        stage = {} if case["stage"] == "sft" else {"rl": case["stage"], "remove_unused_columns": False}
        config = load_cfg(DictDefault({
            "base_model": task["model"], "datasets": [{"path": case["path"], "ds_type": file_type(case), **entry}],
            "sequence_len": task["row_len"], "sample_packing": False, "val_set_size": 0.0, "micro_batch_size": 2,
            "gradient_accumulation_steps": 1, "num_epochs": 1, "learning_rate": 1e-4, "optimizer": "adamw_torch",
            "bf16": False, "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"),
            "dataset_num_proc": 1, **stage,
        }))  # fmt: skip
        if not stage:
            yield from ((row["input_ids"], row["labels"], False) for row in load_datasets(cfg=config).train_dataset)
            return
        data = load_preference_datasets(cfg=config).train_dataset
        yield from trl_examples(trainers, case["stage"], task, data, folder)  # its trainers are made of TRL's

    return read


READERS: Mapping[str, Callable[[Mapping[str, Any]], Read]] = {
    "TRL": trl_reader, "LLaMA-Factory": factory_reader, "Axolotl": axolotl_reader,
}  # fmt: skip
