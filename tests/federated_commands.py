"""What tests of the federated commands start from, and a training by them: a server and two clients over loopback."""

import socket
from pathlib import Path

from modelwright.cli.main import main
from rank_processes import start_process

FEDEX = "num_rounds: 2\nlocal_steps: 2\nmin_clients: 2\nround_timeout_s: 120\nlora: {r: 4, aggregation: fedex}\n"
"""Settings with adapters whose aggregate also changes frozen weights."""


def run_with_rows(folder: Path) -> Path:
    """Make a run with packed rows and a model."""
    lines = (f"{n} is followed by {n + 1}, and twice {n} is {2 * n}: a line of text." for n in range(900))
    (folder / "text.txt").write_text("\n".join(lines))
    words = ["run", "tiny", "--run-dir", str(folder / "run"), "--data.sources", str(folder / "text.txt")]
    words += ["--stages", "clean,tokenize,pack,pretrain", "--pretrain.num_steps", "2", "--tokenizer.vocab_size", "400"]
    words += ["--pack.seq_len", "64", "--model.max_seq_len", "64", "--pretrain.batch_tokens", "256"]
    assert main([*words, "--hardware.num_threads", "1"]) == 0
    return folder / "run"


def train_with_commands(base: Path, settings: Path, keys: Path, folder: Path) -> None:
    """`modelwright federated`: the clients ann and ben in processes of their own, the server in this one. keys: of
    both; folder: gets a folder for each of the three.
    """
    common, port = ["--settings", str(settings), "--keys", str(keys)], str(free_port())
    clients = [
        start_process(
            "modelwright.cli.main", "federated", "client", str(base), "--rows", str(base), "--name", name, "--server",
            f"127.0.0.1:{port}", "--learning-rate", "0.2", *common, "--dir", str(folder / name),
        )
        for name in ("ann", "ben")
    ]  # fmt: skip
    assert main(["federated", "server", str(base), "--port", port, *common, "--dir", str(folder / "server")]) == 0
    assert [client.end()[0] for client in clients] == [0, 0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
