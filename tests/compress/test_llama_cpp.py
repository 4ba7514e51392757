"""GGUF files in llama.cpp itself: logits, and greedy tokens beside those of our engine. It needs `pip install
llama-cpp-python` (0.3.36 was used), which is compiled for minutes and therefore is not in the extra `dev`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from chat_templates import HERMES, chatml_tokenizer
from gguf_models import EXPORTED, model_folder
from hf_folders import VOCAB_SIZE
from modelwright.compress.gguf import export_gguf
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.hf import load_model

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

NUM_TOKENS = 32
TOLERANCE = 0.03
"""Largest difference of logits, whose standard deviation is about 1: llama.cpp rounds keys, values and the inputs of
products to F16."""


@pytest.mark.parametrize("name", EXPORTED)
def test_llama_cpp_generates_the_same_tokens(name: str, tmp_path: Path) -> None:
    case, changes = EXPORTED[name]
    (tmp_path / "tokenizer").mkdir()
    chatml_tokenizer(tmp_path / "tokenizer", HERMES)
    files = {path.name: path for path in (tmp_path / "tokenizer").iterdir()}
    folder = model_folder(case, tmp_path / "model", files, **changes)
    path = export_gguf(folder, tmp_path / "model.gguf", number_format="f16", name="x")
    model = load_model(folder).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.half().float())  # what the file holds
    prompt = torch.randint(VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    (ours,) = generate(model, [prompt], [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)])
    ids = [*prompt, *ours.token_ids]
    with torch.no_grad():
        logits_TV = model.logits(model(torch.tensor([ids]), torch.arange(len(ids))[None], causal_attend()))[0].numpy()

    theirs = llama_cpp.Llama(
        model_path=str(path), n_ctx=64, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
    )
    theirs.eval(ids)
    found_TV = np.array(theirs.scores[: len(ids)])
    np.testing.assert_allclose(found_TV, logits_TV, atol=TOLERANCE)
    theirs.reset()
    generated = theirs.generate(prompt, temp=0.0, top_k=1, reset=True)
    assert [next(generated) for _ in range(NUM_TOKENS)] == ours.token_ids
