"""GGUF files: tensors, settings and vocabulary as read back, the model's logits from the file alone, and refusals."""

import json
import math
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, normalizers

from chat_templates import HERMES, chatml_tokenizer
from gguf_models import EXPORTED, model_folder
from hf_folders import VOCAB_SIZE, write_folder
from modelwright.compress.gguf import GgufFormat, architecture_of, export_gguf
from modelwright.compress.gguf_vocabulary import TokenKind, pre_tokenizer_name, read_vocabulary
from modelwright.core.config import ConfigError, ModelError
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.attention import causal_attend
from modelwright.model.hf import load_config, load_model, type_of
from modelwright.pipeline.exports.gguf import modelfile

gguf = pytest.importorskip("gguf")

REFUSED = {
    "llama-dynamic": "rope_scaling: llama.cpp's llama has no scaling dynamic",
    "llama-yarn-mscale": "rope_scaling: llama.cpp's llama takes no attention factor of its own",
    "llama-gelu": "hidden_act: llama.cpp's llama has another activation",
    "qwen2-window": "sliding_window: llama.cpp's qwen2 ignores the window",
    "mistral": "sliding_window: llama.cpp's llama ignores the window",
    "phi3-window": "sliding_window: llama.cpp's phi3 ignores the window",
    "smollm3": "no_rope_layers: llama.cpp's smollm3 gives positions to other layers",
    "qwen3-yarn-biased": "attention_bias: llama.cpp's qwen3 has no output_bias",
    "gemma2": "query_pre_attn_scalar: llama.cpp's gemma2 scales attention by another factor",
    "gemma2-untied": "tie_word_embeddings: llama.cpp's gemma2 always ties the embeddings",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tokenizer's files by name, for every folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    chatml_tokenizer(folder, HERMES)
    return {path.name: path for path in folder.iterdir()}


class File:
    """A GGUF file as `gguf` reads it; tensors in FP32 and in PyTorch's order of dimensions."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.settings = {name: field.contents() for name, field in reader.fields.items()}
        self.formats = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.tensors = {
            tensor.name: torch.from_numpy(
                np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            ).view(*reversed(tensor.shape.tolist()))
            for tensor in reader.tensors
        }

    def setting(self, name: str, default: Any = None) -> Any:
        return self.settings.get(f"{self.settings['general.architecture']}.{name}", default)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x_THd: torch.Tensor, base: float, file: File) -> torch.Tensor:
    """As ggml does it: neighbors (llama, smollm3) or halves, with factors of the frequencies from the file."""
    num_rotated = file.setting("rope.dimension_count")
    half = num_rotated // 2
    frequencies = base ** -(torch.arange(half, dtype=torch.float64) * 2 / num_rotated)
    frequencies /= file.tensors["rope_freqs.weight"].double() if "rope_freqs.weight" in file.tensors else 1.0
    frequencies /= file.setting("rope.scaling.factor", 1.0)
    angles = torch.arange(len(x_THd), dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned = x_THd.double().clone()
    if file.settings["general.architecture"] in ("llama", "smollm3"):
        first, second = slice(0, num_rotated, 2), slice(1, num_rotated, 2)
    else:
        first, second = slice(0, half), slice(half, num_rotated)
    a, b = x_THd[..., first].double(), x_THd[..., second].double()
    turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
    return turned.float()


def project(file: File, x: torch.Tensor, name: str) -> torch.Tensor:
    out = x @ file.tensors[f"{name}.weight"].T
    return out + file.tensors[f"{name}.bias"] if f"{name}.bias" in file.tensors else out


def attend(file: File, layer: int, x: torch.Tensor) -> torch.Tensor:
    heads, groups = file.setting("attention.head_count"), file.setting("attention.head_count_kv")
    width, name = file.setting("attention.key_length"), f"blk.{layer}"
    if f"{name}.attn_qkv.weight" in file.tensors:
        q, k, v = project(file, x, f"{name}.attn_qkv").split([heads * width, groups * width, groups * width], dim=-1)
    else:
        q, k, v = (project(file, x, f"{name}.attn_{one}") for one in "qkv")
    q, k, v = (one.view(len(x), -1, width) for one in (q, k, v))
    eps = file.setting("attention.layer_norm_rms_epsilon")
    if f"{name}.attn_q_norm.weight" in file.tensors:
        q, k = (norm(one, file.tensors[f"{name}.attn_{n}_norm.weight"], eps) for one, n in ((q, "q"), (k, "k")))
    every = {"gemma2": 2, "gemma3": 6}.get(file.settings["general.architecture"], 0)
    pattern = file.setting("attention.sliding_window_pattern") or [
        every > 0 and (one + 1) % every != 0 for one in range(layer + 1)
    ]
    if file.settings["general.architecture"] != "smollm3" or (layer + 1) % 4:
        base = file.setting("rope.freq_base_swa") if pattern[layer] else None
        q, k = (rotate(one, base or file.setting("rope.freq_base"), file) for one in (q, k))
    k, v = (one.repeat_interleave(heads // groups, dim=1) for one in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(width)
    if cap := file.setting("attn_logit_softcapping"):
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    window = file.setting("attention.sliding_window") if pattern[layer] else 0
    hidden = (distance < 0) | (distance >= window if window else torch.zeros_like(distance, dtype=torch.bool))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return project(file, torch.einsum("hts,shd->thd", weights, v).flatten(1), f"{name}.attn_output")


def feed_forward(file: File, layer: int, x: torch.Tensor) -> torch.Tensor:
    name = f"blk.{layer}"
    if f"{name}.ffn_gate.weight" in file.tensors:
        gate, up = project(file, x, f"{name}.ffn_gate"), project(file, x, f"{name}.ffn_up")
    else:
        gate, up = project(file, x, f"{name}.ffn_up").chunk(2, dim=-1)
    is_gemma = file.settings["general.architecture"].startswith("gemma")
    gate = F.gelu(gate, approximate="tanh") if is_gemma else F.silu(gate)
    return project(file, gate * up, f"{name}.ffn_down")


def logits_of(file: File, ids: torch.Tensor) -> torch.Tensor:
    """The logits [T, V] that llama.cpp's graphs compute, from the file alone."""
    eps, is_gemma = file.setting("attention.layer_norm_rms_epsilon"), "gemma" in file.settings["general.architecture"]
    x = file.tensors["token_embd.weight"][ids] * (math.sqrt(file.setting("embedding_length")) if is_gemma else 1.0)
    for layer in range(file.setting("block_count")):
        own = {name.removeprefix(f"blk.{layer}."): one for name, one in file.tensors.items()}
        out = attend(file, layer, norm(x, own["attn_norm.weight"], eps))
        x = x + (norm(out, own["post_attention_norm.weight"], eps) if is_gemma else out)
        out = feed_forward(file, layer, norm(x, own["ffn_norm.weight"], eps))
        x = x + (norm(out, own["post_ffw_norm.weight"], eps) if is_gemma else out)
    head = file.tensors.get("output.weight", file.tensors["token_embd.weight"])
    logits = norm(x, file.tensors["output_norm.weight"], eps) @ head.T
    cap = file.setting("final_logit_softcapping")
    return cap * torch.tanh(logits / cap) if cap else logits


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_the_file_alone_gives_the_models_logits(name: str, tmp_path: Path, files: dict[str, Path]) -> None:
    case, changes = EXPORTED[name]
    folder = model_folder(case, tmp_path / "model", files, **changes)
    file = File(export_gguf(folder, tmp_path / "model.gguf", number_format="f16", name="x"))
    model = load_model(folder).eval()
    ids = torch.randint(VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.half().float())  # what the file holds
        expected = model.logits(model(ids[None], torch.arange(24)[None], causal_attend()))[0]
    torch.testing.assert_close(logits_of(file, ids), expected, rtol=1e-3, atol=2e-3)
    assert len(file.settings["tokenizer.ggml.tokens"]) == VOCAB_SIZE == len(file.tensors["token_embd.weight"])
    kinds = {name: file.formats[name] for name in ("token_embd.weight", "output_norm.weight")}
    assert kinds == {"token_embd.weight": "F16", "output_norm.weight": "F32"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused_by_name(name: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path)
    config = load_config(tmp_path)
    with pytest.raises(ModelError, match=f"{tmp_path}: {REFUSED[name]}"):
        architecture_of(config, type_of(config).name, str(tmp_path))


@pytest.mark.parametrize(("number_format", "bound"), [("f16", 1e-3), ("q8_0", 8e-3), ("q4_0", 0.13)])
def test_number_formats(number_format: GgufFormat, bound: float, tmp_path: Path, files: dict[str, Path]) -> None:
    changes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = model_folder("qwen3", tmp_path / "model", files, **changes, tie_word_embeddings=False)
    file = File(export_gguf(folder, tmp_path / "m.gguf", number_format=number_format, name="x"))
    weights = dict(load_model(folder).named_parameters())
    names = {"blk.1.ffn_up": "blocks.1.ffn.up_proj", "token_embd": "embedding", "output": "head"}
    for stored, own in names.items():
        expected = weights[f"{own}.weight"].detach()
        error = (file.tensors[f"{stored}.weight"] - expected).abs().max() / expected.abs().max()
        assert float(error) < bound
    ends = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q8_0"}[number_format]
    assert file.formats["output.weight"] == file.formats["token_embd.weight"] == ends
    assert file.formats["blk.0.ffn_gate.weight"] == number_format.upper()
    assert file.formats["blk.0.ffn_down.weight"] == "F16"  # its rows have 77 values
    assert file.settings["general.file_type"] == {"f16": 1, "q8_0": 7, "q4_0": 2}[number_format]


def test_vocabulary_of_bytes(files: dict[str, Path], tmp_path: Path) -> None:
    folder = next(iter(files.values())).parent
    tokenizer = Tokenizer.load(folder)
    vocabulary = read_vocabulary(folder, tokenizer.vocab_size + 3)
    assert (vocabulary.model, vocabulary.pre, vocabulary.adds_bos) == ("gpt2", "dbrx", False)
    assert vocabulary.tokens[-1] == f"[PAD{tokenizer.vocab_size + 2}]"
    assert vocabulary.kinds[-3:] == [TokenKind.UNUSED] * 3
    assert vocabulary.kinds[tokenizer.end_id] == TokenKind.CONTROL
    assert vocabulary.special["eot"] == vocabulary.special["eos"] == tokenizer.end_id
    assert vocabulary.chat_template == HERMES
    # the merges, applied as the definition of BPE says, give the tokenizer's own ids
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocabulary.merges)}
    byte_of = {token: place for place, token in enumerate(vocabulary.tokens)}
    for word in ("weather", "assistant", "degrees"):
        symbols = list(word)
        while True:
            pairs = [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]
            if not pairs:
                break
            _, at = min(pairs)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        assert [byte_of[symbol] for symbol in symbols] == tokenizer.encode(word)


def test_added_tokens_that_are_not_special_are_text(files: dict[str, Path], tmp_path: Path) -> None:
    """llama.cpp hides CONTROL tokens, and would drop the marks of thoughts and calls from an answer."""
    folder = next(iter(files.values())).parent
    definition = json.loads((folder / "tokenizer.json").read_text())
    size = Tokenizer.load(folder).vocab_size
    marks = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for place, text in enumerate(("<think>", "</think>")):
        definition["added_tokens"].append({"id": size + place, "content": text, **marks})
    shutil.copytree(folder, tmp_path / "marked")
    (tmp_path / "marked" / "tokenizer.json").write_text(json.dumps(definition))
    kinds = read_vocabulary(tmp_path / "marked", size + 2).kinds
    assert kinds[size:] == [TokenKind.USER_DEFINED] * 2
    assert TokenKind.CONTROL in kinds[:size]


def test_begin_tokens_follow_the_tokenizer(tmp_path: Path) -> None:
    train_tokenizer(["some words to learn from"], TokenizerConfig(vocab_size=300)).save(tmp_path)
    vocabulary = read_vocabulary(tmp_path, 300)
    assert vocabulary.adds_bos is True
    assert vocabulary.special["eot"] != vocabulary.special["eos"]


def test_a_third_stop_token_is_kept(tmp_path: Path) -> None:
    trained = train_tokenizer(
        ["some words to learn from"], TokenizerConfig(vocab_size=300, special_tokens=("<|eom|>",))
    )
    trained.save(tmp_path)
    stop = trained.id_of("<|eom|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [trained.eos_id, stop]}))
    assert read_vocabulary(tmp_path, 300).special["eom"] == stop
    text = modelfile(Tokenizer.load(tmp_path), "m.gguf", max_seq_len=64, adds_bos=True)
    assert 'PARAMETER stop "<|eom|>"' in text


def sentencepiece_folder(folder: Path, **changes: Any) -> Path:
    """A BPE of characters with bytes as a fallback, as Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
    model = models.BPE(
        {piece: place for place, piece in enumerate(pieces)},
        [("a", "b"), ("\u2581", "ab")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])  # type: ignore[assignment]
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    definition = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**definition, **changes}))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_vocabulary_of_sentencepiece(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(sentencepiece_folder(tmp_path), 270)
    assert (vocabulary.model, vocabulary.adds_space, vocabulary.adds_bos) == ("llama", True, True)
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    assert score["ab"] > score["\u2581ab"] > score["a"]
    kinds = dict(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    assert kinds["<0x41>"] == TokenKind.BYTE
    assert kinds["<s>"] == TokenKind.CONTROL
    assert kinds["[PAD269]"] == TokenKind.UNUSED


@pytest.mark.parametrize(("changes", "problem"), [
    ({"normalizer": {"type": "Lowercase"}}, "knows no step 'Lowercase'"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "knows no step 'Whitespace'"),
])  # fmt: skip
def test_other_steps_are_refused(changes: dict, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=problem):
        read_vocabulary(sentencepiece_folder(tmp_path, **changes), 264)


def with_phi3_tokens(folder: Path, **changes: dict[str, bool]) -> Path:
    """A folder whose added tokens take the white space after them as Phi-3's do; changes: of tokens, by their text."""
    definition = json.loads((sentencepiece_folder(folder) / "tokenizer.json").read_text())
    added = {entry["content"]: entry for entry in definition["added_tokens"]}
    added["<|end|>"] = {**added["</s>"], "id": 264, "content": "<|end|>", "rstrip": True}
    added["</s>"] |= {"special": False, "rstrip": True}
    for content, change in changes.items():
        added[content] |= change
    (folder / "tokenizer.json").write_text(json.dumps({**definition, "added_tokens": list(added.values())}))
    return folder


@pytest.mark.parametrize("name", ["Phi-3-mini", "my-phi3", "anything"])
@pytest.mark.parametrize("strips", [True, False])
def test_what_llama_cpp_reads_into_a_name_is_true_of_the_tokenizer(name: str, strips: bool, tmp_path: Path) -> None:
    """llama.cpp strips white space after special tokens where `general.name` has `phi-3` or `phi3`."""
    folder = tmp_path / name
    write_folder("phi3", folder, vocab_size=265)
    (with_phi3_tokens if strips else sentencepiece_folder)(folder)
    shown = File(export_gguf(folder, tmp_path / "x.gguf", number_format="f16", name=name)).settings["general.name"]
    assert any(mark in shown.lower() for mark in ("phi-3", "phi3")) == strips


@pytest.mark.parametrize(("changes", "problem"), [
    ({"<|end|>": {"rstrip": False}}, r"differs from Phi-3's in <\|end\|>"),
    ({"<s>": {"rstrip": True}}, "differs from Phi-3's in <s>"),
    ({"<s>": {"lstrip": True}}, r"added token with lstrip \(<s>\)"),
])  # fmt: skip
def test_added_tokens_that_llama_cpp_would_read_otherwise_are_refused(
    changes: dict, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=problem):
        read_vocabulary(with_phi3_tokens(tmp_path, **changes), 265)


@pytest.mark.parametrize(("steps", "name"), [
    ([{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}], "gpt-2"),
    ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False}], "smollm"),
    ([{"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated"}, {"type": "ByteLevel",
      "add_prefix_space": False, "use_regex": False}], ""),
    ([{"type": "ByteLevel", "add_prefix_space": True}], ""),
])  # fmt: skip
def test_names_of_pre_tokenizers(steps: list, name: str) -> None:
    definition = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": {"type": "BPE"}}
    if name:
        assert pre_tokenizer_name(definition, "m") == name
    else:
        with pytest.raises(ModelError, match=r"m: tokenizer\.json: llama\.cpp knows no pre_tokenizer"):
            pre_tokenizer_name(definition, "m")


def test_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.Unigram([("</s>", 0.0), ("a", -1.0)], 0))
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ModelError, match="knows no model 'Unigram'"):
        read_vocabulary(tmp_path, 10)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'modelwright\[gguf\]'"):
        export_gguf(tmp_path, tmp_path / "x.gguf", number_format="f16", name="x")
