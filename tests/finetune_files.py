"""What a user brings to a fine-tuning: a small model folder with a chat template that knows tools, and examples."""

import json
from pathlib import Path

from chat_templates import HERMES, TOOL_CHAT, WEATHER, chatml_tokenizer
from modelwright.model.hf import save_model
from tiny_decoder import make_decoder

COLORS = ("red", "green", "blue", "white", "black")


def write_model(folder: Path, *, template: str = HERMES, vocab_size: int = 420, **shape) -> Path:
    """A Qwen3 of two layers with random weights, and a ChatML tokenizer."""
    tokenizer = chatml_tokenizer(folder, template, vocab_size=vocab_size)
    settings = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "max_seq_len": 512, "init_std": 0.05, **shape}
    model = make_decoder(vocab_size=tokenizer.vocab_size, **settings)
    save_model(model, folder, eos_id=tokenizer.end_id)
    return folder


def write_examples(path: Path, *, num_records: int = 60) -> Path:
    """Questions with short answers that many of them have in common, and two conversations with calls of tools."""
    records: list[dict] = [
        {
            "messages": [
                {"role": "user", "content": f"Box {number}: which color?"},
                {"role": "assistant", "content": f"The color is {COLORS[number % len(COLORS)]}."},
            ]
        }
        for number in range(num_records)
    ]
    other = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello to you."}]
    records += [{"messages": TOOL_CHAT, "tools": [WEATHER]}, {"messages": other, "tools": [WEATHER]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
