"""The server that many begin with: FastAPI around `generate` of transformers in FP32, one request at a time.

`python -m modelwright_claims.naive_server MODEL_FOLDER` prints its address when it is ready. Keys and values are cached
within a request, and nothing is shared between two.
"""

import socket
import sys
import threading
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer


class CompletionBody(BaseModel):
    """The fields that it reads of a request; other fields are ignored."""

    prompt: str
    max_tokens: int


def build(folder: str) -> FastAPI:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    app, lock = FastAPI(), threading.Lock()

    @app.post("/v1/completions")
    def complete(body: CompletionBody) -> dict[str, object]:
        with lock, torch.inference_mode():
            inputs = tokenizer(body.prompt, return_tensors="pt")
            ids = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=body.max_tokens,
                do_sample=False,
                use_cache=True,
            )
        new = ids[0, inputs["input_ids"].shape[1] :]
        return {"choices": [{"text": tokenizer.decode(new)}], "usage": {"completion_tokens": len(new)}}

    return app


def main() -> None:
    app = build(sys.argv[1])
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as where uvicorn binds the socket itself
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()
