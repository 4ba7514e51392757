"""The engines of the claim on integer inference: real processes on one small model."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from modelwright.core.config import ModelwrightError
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import ModelConfig
from modelwright.ops import cpu_kernels
from modelwright_claims import int8 as inference_arms
from modelwright_claims.inference_worker import survives
from modelwright_claims.int8 import ARMS, EAGER, INT4_CODES, INT8, PEERS_PYTHON, paces, running, write_models

SHAPE = ModelConfig(
    vocab_size=320, num_layers=1, model_dim=64, num_heads=2, num_kv_heads=1, head_dim=32, ffn_dim=96, max_seq_len=320,
    tie_embeddings=False,
)  # fmt: skip
ABSENT = "llama.cpp, 8 bits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    place = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        texts = ["the quick brown fox jumps over the lazy dog", "what does this do? it copies a tree of files"]
        patch.setattr(
            inference_arms, "_tokenizer", lambda size: train_tokenizer(texts, TokenizerConfig(vocab_size=size))
        )
        _, num_bytes = write_models(SHAPE, place)
    assert num_bytes["fp32"] > num_bytes["int8"]
    assert num_bytes["fp32"] > num_bytes["int4"]
    return place


@pytest.mark.slow
def test_engines_take_turns_in_processes_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_kernels.instruction_set():
        pytest.skip("there is no C++ compiler here")
    monkeypatch.delenv(PEERS_PYTHON, raising=False)
    names = [INT8, INT4_CODES, *([EAGER] if find_spec("transformers") else []), ABSENT]
    with running({name: ARMS[name] for name in names}, folder, threads=1) as (processes, missing):
        if find_spec("llama_cpp") is None:
            assert missing == {ABSENT: "No module named 'llama_cpp'"}
        found = paces(processes, (1, 3), prompt=40, num_steps=2, turn=1)
        assert set(found) == {"decode, 1 stream", "decode, 3 streams", "prefill, 40 tokens"}
        for of_case in found.values():
            assert set(of_case) == set(processes)
            assert all(pace > 0 for pace in of_case.values())
        assert len(processes[INT8].seconds(3, 20, 5)) == 5
        assert all(process.version for process in processes.values())
        processes[INT8]._process.kill()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(ModelwrightError, match="the engine ended"):
            processes[INT8].seconds(1, 4, 1)


def test_work_that_kills_its_process_is_found_out() -> None:
    assert survives(lambda: None)
    assert not survives(lambda: os.kill(os.getpid(), signal.SIGSEGV))
