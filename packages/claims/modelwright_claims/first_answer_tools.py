"""The tools of `first_answer`, as the documentation of each installs, asks and serves, and the model that they open."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelwright.compress.gguf import export_gguf
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.recipes.load import recipe
from modelwright_claims.tool_environment import MESSAGES, QUESTION, run

NUM_TOKENS = 16
FOLDER, GGUF, ONNX = "model", "model.gguf", "model-onnx"
"""The same weights in the layout of Hugging Face, as one file of llama.cpp and as a folder of ONNX Runtime GenAI."""
OURS, TRANSFORMERS, OPENVINO, ONNX_RUNTIME = "Modelwright", "transformers", "OpenVINO GenAI", "ONNX Runtime GenAI"
COMPILED, READY = "llama-cpp-python, compiled", "llama-cpp-python, ready wheel"


@dataclass(frozen=True, kw_only=True)
class Tool:
    """packages: what pip installs, the tool first; a name in braces is a wheel that was built here, or the build of
    torch; downloads: further words for `pip download`; command: prints the answer after the text `before`; model: what
    it opens; server: serves the chat API of OpenAI at `{port}`, with `server_packages`.
    """

    packages: Sequence[str]
    downloads: Sequence[str] = ()
    command: Sequence[str]
    before: str = "\n"
    model: str
    server_packages: Sequence[str] = ()
    server: Sequence[str] = ()


BY_TRANSFORMERS = f"""
from transformers import TextStreamer, pipeline
pipe = pipeline("text-generation", "{FOLDER}")
streamer = TextStreamer(pipe.tokenizer, skip_prompt=True)
pipe({MESSAGES}, max_new_tokens={NUM_TOKENS}, do_sample=False, streamer=streamer)
"""
BY_LLAMA_CPP = f"""
from llama_cpp import Llama
llm = Llama("{GGUF}", verbose=False)
for part in llm.create_chat_completion({MESSAGES}, max_tokens={NUM_TOKENS}, temperature=0, stream=True):
    print(part["choices"][0]["delta"].get("content", ""), end="", flush=True)
"""
BY_OPENVINO = f"""
from openvino_genai import LLMPipeline
pipe, show = LLMPipeline("{GGUF}", "CPU"), lambda text: print(text, end="", flush=True)
pipe.generate("{QUESTION}", max_new_tokens={NUM_TOKENS}, do_sample=False, streamer=show)
"""
BY_ONNX_RUNTIME = f"""
import json, onnxruntime_genai as og
model = og.Model("{ONNX}")
tokenizer, params = og.Tokenizer(model), og.GeneratorParams(model)
prompt = tokenizer.encode(tokenizer.apply_chat_template(json.dumps({MESSAGES}), add_generation_prompt=True))
params.set_search_options(max_length=len(prompt) + {NUM_TOKENS}, do_sample=False)
generator, stream = og.Generator(model, params), tokenizer.create_stream()
generator.append_tokens(prompt)
while not generator.is_done():
    generator.generate_next_token()
    print(stream.decode(generator.get_next_tokens()[0]), end="", flush=True)
"""
TOOLS: Mapping[str, Tool] = {
    OURS: Tool(
        packages=["{modelwright}"],
        command=["modelwright", "chat", FOLDER, "--temperature", "0"],
        before="\n> ",
        model=FOLDER,
        server_packages=["{modelwright}[serve]"],
        server=["modelwright", "serve", FOLDER, "--port", "{port}"],
    ),
    TRANSFORMERS: Tool(
        packages=["transformers", "{torch}"],
        command=["python", "-c", BY_TRANSFORMERS],
        model=FOLDER,
        server_packages=["transformers[serving]", "{torch}"],
        server=["transformers", "serve", FOLDER, "--host", "127.0.0.1", "--port", "{port}"],
    ),
    OPENVINO: Tool(packages=["openvino-genai"], command=["python", "-c", BY_OPENVINO], model=GGUF),
    ONNX_RUNTIME: Tool(packages=["onnxruntime-genai"], command=["python", "-c", BY_ONNX_RUNTIME], model=ONNX),
    COMPILED: Tool(
        packages=["llama-cpp-python"],
        downloads=["--no-binary=llama-cpp-python", "scikit-build-core[pyproject]"],
        command=["python", "-c", BY_LLAMA_CPP],
        model=GGUF,
    ),
    READY: Tool(
        packages=["{llama_cpp_python}"],
        command=["python", "-c", BY_LLAMA_CPP],
        model=GGUF,
        server_packages=["{llama_cpp_python}[server]"],
        server=["python", "-m", "llama_cpp.server", "--model", GGUF, "--model_alias", FOLDER, "--port", "{port}"],
    ),
}
RIVALS = [side for side in TOOLS if side != OURS]


def write_model(folder: Path, file: str) -> None:
    """Write a model with drawn weights into `folder`, in the format that `file` has, unless it is there."""
    if not (folder / FOLDER).exists():
        model, texts = (
            Decoder(recipe("quickstart").model),
            machine_corpus(fraction=0.05, skip=lambda reason, file: None),
        )
        model.init_weights(0)
        tokenizer = train_tokenizer([one.text for one in texts], TokenizerConfig(vocab_size=model.config.vocab_size))
        shown = [tokenizer.token_text(token).strip() for token in range(tokenizer.vocab_size)]
        letters = [token for token, text in enumerate(shown) if text.isascii() and text.isalpha()]
        assert model.head is not None
        head = model.head.weight.data.clone()
        # The likeliest token is then of letters alone, which no tool holds back and which end no answer.
        model.head.weight.data.zero_()[letters] = head[letters]
        save_model_folder(model, tokenizer, folder / FOLDER)
    if file == GGUF and not (folder / GGUF).exists():
        export_gguf(folder / FOLDER, folder / GGUF, number_format="f16", name=FOLDER)
    if file == ONNX:
        words = ["-i", str(folder / FOLDER), "-o", str(folder / ONNX), "-c", str(folder / "cache")]
        run([sys.executable, "-m", "onnxruntime_genai.models.builder", *words, "-p", "fp32", "-e", "cpu"])
