"""An engine in a separate process, which times the tokens that it generates.

    python -P inference_worker.py ENGINE WEIGHTS FOLDER THREADS

The first line that it writes is `{"version": ...}`, or `{"missing": why}` where the engine cannot be imported. For
each line `[streams, prompt_len, num_new]` it then writes the seconds from the start to the first token of all streams,
and those of each further token. It is run by path and imports nothing of this package, so that an engine may be
installed next to another interpreter than the product. Generation is greedy, and no token ends it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

Ids = list[list[int]]
MOST_STREAMS, MOST_TOKENS = 32, 320
"""Maximum number of streams of a request, and of tokens of a stream."""
BATCH_TOKENS = 512
"""Prompt tokens of a step, as our engine has by default."""


class Engine(Protocol):
    """An engine with a model."""

    version: str

    def stamps(self, prompts: Ids, num_new: int) -> list[float]:
        """The times when the work began and when each token, of all streams, was there."""
        ...


class OwnEngine:
    """Modelwright's, as it serves."""

    def __init__(self, weights: str, folder: Path, threads: int) -> None:
        import torch

        import modelwright.infer.engine as engine
        from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
        from modelwright.model.hf import load_model

        torch.set_num_threads(threads)
        self.version = version("modelwright")
        place = folder / weights
        model: Any = load_int8(place, Int8WeightsConfig()) if is_int8_folder(place) else load_model(place)
        config = engine.EngineConfig(
            max_num_seqs=MOST_STREAMS, kv_cache_tokens=MOST_STREAMS * MOST_TOKENS, enable_prefix_caching=False
        )
        self.engine = engine.Engine(model, config)
        if self.engine.why_no_operator and os.environ.get("MODELWRIGHT_CPU_KERNELS") != "0":
            raise RuntimeError(f"no operator decodes this model: {self.engine.why_no_operator}")

    def stamps(self, prompts: Ids, num_new: int) -> list[float]:
        from modelwright.infer.sequence import SamplingParams

        params = SamplingParams(max_tokens=self.engine.max_seq_len, temperature=0.0)
        stamps = [time.perf_counter()]
        for stream, prompt in enumerate(prompts):
            self.engine.add(str(stream), prompt, params)
        while len(self.engine.step()) < len(prompts):
            pass  # prompts, in chunks
        stamps.append(time.perf_counter())
        for _ in range(num_new - 1):
            self.engine.step()
            stamps.append(time.perf_counter())
        for stream in range(len(prompts)):
            self.engine.abort(str(stream))
        return stamps


class Transformers:
    """Eager PyTorch: `generate` of transformers with its cache, FP32."""

    def __init__(self, weights: str, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.version = version("transformers")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder / weights, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def stamps(self, prompts: Ids, num_new: int) -> list[float]:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        ids = torch.tensor(prompts)
        stamps = [time.perf_counter()]

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
                stamps.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, use_cache=True,
                pad_token_id=0, stopping_criteria=StoppingCriteriaList([Clock()]),
            )  # fmt: skip
        return stamps


class OpenVino:
    """OpenVINO GenAI's continuous batching with its own defaults for precision and cache."""

    def __init__(self, weights: str, folder: Path, threads: int) -> None:
        # It obeys a limit to AVX2 in its products and not in the layouts of their weights, and fails
        os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
        import openvino_genai as genai

        self.version = version("openvino-genai")
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = 1
        scheduling.max_num_seqs = MOST_STREAMS
        scheduling.max_num_batched_tokens = BATCH_TOKENS
        scheduling.enable_prefix_caching = False
        file = str(folder / f"{weights}.gguf")
        self.pipeline = genai.ContinuousBatchingPipeline(file, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self.number = 0

    def stamps(self, prompts: Ids, num_new: int) -> list[float]:
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = MOST_TOKENS - len(prompts[0]), True, False
        handles = []
        stamps = [time.perf_counter()]
        for prompt in prompts:
            handles.append(self.pipeline.add_request(self.number, Tensor(np.array([prompt], dtype=np.int64)), config))
            self.number += 1
        waiting = set(range(len(handles)))
        while len(stamps) <= num_new:
            self.pipeline.step()
            has_new = {place for place, handle in enumerate(handles) if handle.can_read() and handle.read()}
            waiting -= has_new
            if not waiting:
                stamps.append(time.perf_counter())
        for handle in handles:
            handle.cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return stamps


class OnnxRuntime:
    """ONNX Runtime GenAI, on the output of its own model builder for the Hugging Face folder; activations are INT8."""

    def __init__(self, weights: str, folder: Path, threads: int) -> None:
        genai = import_module("onnxruntime_genai")

        self.version = version("onnxruntime-genai")
        place = folder / f"onnxruntime-{weights}"
        if not place.is_dir():
            built = subprocess.run(
                [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder / "fp32", "-o", place,
                 "-p", weights, "-e", "cpu", "-c", folder / "cache", "--extra_options", "accuracy_level=4",
                 "block_size=32"], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if built.returncode:
                raise RuntimeError(f"ONNX Runtime's model builder failed: {built.stdout[-2000:]}")
        settings = json.loads((place / "genai_config.json").read_text())
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        (place / "genai_config.json").write_text(json.dumps(settings))
        self.model = genai.Model(str(place))

    def stamps(self, prompts: Ids, num_new: int) -> list[float]:
        import numpy as np

        genai = import_module("onnxruntime_genai")

        params, longest = genai.GeneratorParams(self.model), len(prompts[0]) + num_new
        params.set_search_options(
            batch_size=len(prompts), max_length=longest, min_length=longest, do_sample=False, num_beams=1
        )
        generator = genai.Generator(self.model, params)
        stamps = [time.perf_counter()]
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        for _ in range(num_new):
            generator.generate_next_token()
            stamps.append(time.perf_counter())
        return stamps


def survives(work: Callable[[], object]) -> bool:
    """Return whether a copy of this process does the work, and is not killed by it."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return not os.WIFSIGNALED(os.waitpid(child, 0)[1])


class LlamaCpp:
    """llama.cpp through the C interface of llama-cpp-python, all streams in one batch."""

    def __init__(self, weights: str, folder: Path, threads: int) -> None:
        llama = import_module("llama_cpp")

        self.version = version("llama-cpp-python")
        llama.llama_backend_init()
        file, loading = str(folder / f"{weights}.gguf").encode(), llama.llama_model_default_params()
        if loading.use_extra_bufts and not survives(lambda: self._load(file, loading, threads).stamps([[3, 4]], 2)):
            # Version 0.3.36 repacks weights for AMX and then ends with a segmentation fault on some processors.
            loading.use_extra_bufts = False
            self.version += ", without repacked weights, with which it crashes here"
        self._load(file, loading, threads)

    def _load(self, file: bytes, loading: Any, threads: int) -> "LlamaCpp":
        llama = import_module("llama_cpp")

        model = llama.llama_model_load_from_file(file, loading)
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = MOST_STREAMS * MOST_TOKENS, MOST_STREAMS
        settings.n_batch, settings.n_ubatch = MOST_STREAMS * 64, BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama.llama_init_from_model(model, settings)
        self.batch = llama.llama_batch_init(settings.n_batch, 0, 1)
        self.greedy = llama.llama_sampler_init_greedy()
        return self

    def stamps(self, prompts: Ids, num_new: int) -> list[float]:
        llama = import_module("llama_cpp")

        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        stamps = [time.perf_counter()]
        rows, start = prompts, 0
        for _ in range(num_new):
            tokens = self._next(rows, start)
            start += len(rows[0])
            rows = [[token] for token in tokens]
            stamps.append(time.perf_counter())
        return stamps

    def _next(self, rows: Ids, start: int) -> list[int]:
        """The next token of each stream, whose rows begin at position `start`."""
        llama = import_module("llama_cpp")

        batch, place, last = self.batch, 0, []
        for stream, row in enumerate(rows):
            for at, token in enumerate(row):
                batch.token[place], batch.pos[place] = token, start + at
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, stream
                batch.logits[place] = at + 1 == len(row)
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        if llama.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        return [llama.llama_sampler_sample(self.greedy, self.context, one) for one in last]


ENGINES: Mapping[str, Callable[[str, Path, int], Engine]] = {
    "own": OwnEngine,
    "transformers": Transformers,
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries write is no answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    name, weights, folder, threads = sys.argv[1:]
    try:
        engine = ENGINES[name](weights, Path(folder), int(threads))
    except ImportError as error:
        return answer({"missing": str(error)})
    answer({"version": engine.version})
    for line in sys.stdin:
        num_streams, prompt_len, num_new = json.loads(line)
        prompts = [[3 + (7 * stream + 3 * place) % 251 for place in range(prompt_len)] for stream in range(num_streams)]
        answer([after - before for before, after in pairwise(engine.stamps(prompts, num_new))])
    return None


if __name__ == "__main__":
    main()
