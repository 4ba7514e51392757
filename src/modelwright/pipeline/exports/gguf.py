"""A GGUF file for llama.cpp, next to a Modelfile, with which `ollama create` makes a model of the GGUF file.

Ollama renders chats by a template in Go's notation. It is derived from the output of the model's own chat template, and
left out if such a template would not give the same text.
"""

from functools import partial
from pathlib import Path
from typing import cast, get_args

from modelwright.compress.gguf import GgufFormat, export_gguf
from modelwright.compress.gguf_vocabulary import read_vocabulary
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError, DataError
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_config
from modelwright.pipeline.exports.export import Export, require_exportable
from modelwright.pipeline.models import FoundModel

_SYSTEM, _USER, _ANSWER, _USER2, _ANSWER2 = "\ue001", "\ue002", "\ue003", "\ue004", "\ue005"
"""Contents of turns: characters for private use, which do not occur in templates."""


def modelfile(tokenizer: Tokenizer, gguf_name: str, *, max_seq_len: int, adds_bos: bool) -> str:
    """Returns the text of the Modelfile next to the GGUF file. adds_bos: True if llama.cpp adds the begin token."""
    stops = [tokenizer.token_text(token_id) for token_id in tokenizer.stop_ids]
    lines = [f"FROM ./{gguf_name}", f"PARAMETER num_ctx {max_seq_len}"]
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    if template := go_template(tokenizer, adds_bos=adds_bos):
        lines.append(f'TEMPLATE """{template}"""')
    return "\n".join(lines) + "\n"


def go_template(tokenizer: Tokenizer, *, adds_bos: bool) -> str:
    """Returns the chat template in Go's notation, for system, user and assistant turns; "" if that cannot express
    it.
    """
    try:
        rendered = partial(tokenizer.chat.render, add_generation_prompt=False)
        first, second = {"role": "user", "content": _USER}, {"role": "user", "content": _USER2}
        turns = [first, {"role": "assistant", "content": _ANSWER}, second, {"role": "assistant", "content": _ANSWER2}]
        before, rest = rendered(turns).split(_USER)
        to_answer, rest = rest.split(_ANSWER)
        between, rest = rest.split(_USER2)
        to_answer2, after_answer = rest.split(_ANSWER2)
        after_user = rendered([first]).split(_USER)[1]
        answer = to_answer.removeprefix(after_user)
        user = between.removeprefix(after_answer)
        with_system, rest = rendered([{"role": "system", "content": _SYSTEM}, first]).split(_SYSTEM)
        after_system = rest.split(_USER)[0].removesuffix(user)
        opening = before.removesuffix(user)
        # Each part must be the same wherever it occurs, because the Go template has one text for each role.
        agree = (
            to_answer == to_answer2 == after_user + answer
            and between == after_answer + user
            and before == opening + user
            and rest == after_system + user + _USER + after_user
            and rendered([first], add_generation_prompt=True) == before + _USER + after_user + answer
        )
    except (DataError, ValueError):
        return ""  # not as many parts, or a conversation that the template refuses
    if not agree:
        return ""
    parts = (opening, with_system, after_system, user, after_user, answer, after_answer)
    # llama.cpp adds the begin token itself: the template must not write it a second time.
    bos = tokenizer.special_tokens.get("bos_token", "") if adds_bos else ""
    opening, with_system = opening.removeprefix(bos), with_system.removeprefix(bos)
    # Such text would open an action of the template, or close its quotes in the Modelfile.
    if any("{{" in part or '"""' in part for part in parts):
        return ""
    return (
        f"{{{{ if .System }}}}{with_system}{{{{ .System }}}}{after_system}{{{{ else }}}}{opening}{{{{ end }}}}"
        f"{{{{ range .Messages }}}}"
        f'{{{{ if eq .Role "user" }}}}{user}{{{{ .Content }}}}{after_user}'
        f'{{{{ else if eq .Role "assistant" }}}}{answer}{{{{ .Content }}}}{after_answer}{{{{ end }}}}'
        f"{{{{ end }}}}{answer}"
    )


def export_gguf_file(found: FoundModel, target: Path, *, number_format: GgufFormat, overwrite: bool) -> Path:
    """Writes a model as the GGUF file `target`, with a Modelfile for Ollama next to it. Returns `target`."""
    if target.suffix != ".gguf":
        raise ConfigError(f"--to: {target} does not end in .gguf; give the path of a file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; choose another file or add --overwrite")
    folder = found.source.folder
    require_exportable(folder)
    export_gguf(folder, target, number_format=number_format, name=found.source.name)
    adds_bos = read_vocabulary(folder, load_config(folder).vocab_size).adds_bos
    text = modelfile(
        Tokenizer.load(folder), target.name, max_seq_len=load_config(folder).max_seq_len, adds_bos=adds_bos
    )
    write_atomic(target.with_name("Modelfile"), text)
    return target


EXPORT = Export(
    name="gguf",
    summary="a GGUF file for llama.cpp, with a Modelfile for Ollama next to it",
    write=lambda found, target, options: export_gguf_file(
        found, target, number_format=cast(GgufFormat, options.dtype), overwrite=options.overwrite
    ),
    target=lambda found, options: (
        (found.run.path / "gguf" if found.run else Path()) / f"{found.source.name}-{options.dtype.upper()}.gguf"
    ),
    dtypes=get_args(GgufFormat),
)
