"""The examples of `examples/cluster/`, checked as far as possible without a cluster."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from every_command import RELAXED
from modelwright.cli.clean import parser as clean_parser
from modelwright.cli.launch import launch_config
from modelwright.cli.launch import parser as launch_parser
from modelwright.core.config import parse, read_overrides, split_settings
from modelwright.recipes.cleaning import CleanCommandConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SLURM, KUBERNETES = EXAMPLES / "clean_ray.sbatch", EXAMPLES / "clean_ray.yaml"
TRAIN_SLURM, TRAIN_KUBERNETES = EXAMPLES / "train.sbatch", EXAMPLES / "train.yaml"
DIRECTIVES = {
    "job-name": r"[\w-]+", "nodes": r"\d+(-\d+)?", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?", "time": r"(\d+-)?\d+(:\d\d){0,2}", "output": r"[\w%./-]+",
    "exclusive": "", "signal": r"(B:)?[A-Z]+@\d+", "requeue": "",
}  # fmt: skip
"""Options of sbatch and the forms of their values, by its manual page."""


def arguments_of_ray(words: list[str]) -> tuple[list[str], list[str]]:
    """The options of `ray symmetric-run` and the command that it runs."""
    assert words[:2] == ["ray", "symmetric-run"]
    place = words.index("--")
    return words[2:place], words[place + 1 :]


def check_ray(options: list[str]) -> dict[str, Any]:
    """The options, as Ray itself reads them."""
    run = pytest.importorskip("ray.scripts.symmetric_run").symmetric_run
    context = run.make_context("ray", [*options, "--", "true"])
    return {**context.params, "rest": list(context.params["ray_args_and_entrypoint"])}


def check_clean(words: list[str]) -> None:
    """A `modelwright clean` whose options exist."""
    assert words[:2] == ["modelwright", "clean"]
    flags = ("out", "engine", "parquet", "explain", "dry-run", "help")
    leading, own, settings = split_settings(words[2:], flags)
    options = clean_parser().parse_args([*leading, *own])
    assert options.engine == "ray"
    parse(CleanCommandConfig, read_overrides(CleanCommandConfig, settings, flags))


@pytest.mark.parametrize("script", [SLURM, TRAIN_SLURM], ids=lambda path: path.stem)
def test_the_slurm_script_is_one(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", script], check=True)
    found = re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, flags=re.MULTILINE)
    assert len(found) == text.count("\n#SBATCH")
    for name, value in found:
        assert re.fullmatch(DIRECTIVES[name], value), name
    first_command = next(line for line in text.splitlines() if line and not line.startswith("#"))
    assert text.rindex("#SBATCH") < text.index(first_command), "sbatch reads no directive behind a command"


def test_the_slurm_script_runs_the_command_on_all_nodes(tmp_path: Path) -> None:
    """With commands in the place of Slurm's that say what they were called with."""
    for name, body in {
        "scontrol": "printf 'n1\\nn2\\nn3\\n'",
        "srun": 'printf "%s\\n" "$RAY_ADDRESS" "$RAY_AUTH_TOKEN" "$@" > called',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "8",
    }  # fmt: skip
    words = ["raw texts/", "more.jsonl", "--out", "/shared/cleaned"]
    subprocess.run(["bash", SLURM, *words], check=True, env=environment, cwd=tmp_path)
    address, token, *called = (tmp_path / "called").read_text().splitlines()
    assert address == "auto"
    assert re.fullmatch(r"[0-9a-f]{32}", token)
    assert "--nodes=3" in called
    options, command = arguments_of_ray(called[called.index("ray") :])
    assert command == ["modelwright", "clean", *words, "--engine", "ray"]
    check_clean(command)
    read = check_ray(options)
    assert (read["address"], read["min_nodes"]) == ("n1:6379", 3)
    assert read["rest"][:2] == ["--num-cpus", "8"]


SRUN = """#!{python}
# Starts the command twice, as two nodes would, with the options of srun before it taken away.
import subprocess, sys
words = sys.argv[1 + next(n for n, word in enumerate(sys.argv[1:]) if not word.startswith("--")) :]
assert words[0] == "modelwright"
assert words[1] == "launch"
command = [sys.executable, "-m", "modelwright.cli.entry", "launch", "--local-addr", "localhost", *words[2:]]
ended = [node.wait() for node in [subprocess.Popen(command), subprocess.Popen(command)]]
sys.exit(max(ended))
"""


@pytest.mark.slow
def test_the_slurm_script_trains_on_all_nodes(tmp_path: Path) -> None:
    """Two nodes of this machine, started by a stand-in for srun; what is trained is what one process trains."""
    for name, body in {
        "scontrol": "#!/bin/bash\nprintf 'localhost\\nlocalhost\\n'\n",
        "srun": SRUN.format(python=sys.executable),
    }.items():
        (tmp_path / name).write_text(body)
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("localhost", 0)) as probe:
        job = probe.getsockname()[1] % 10000
    environment = {
        **os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": str(job),
    }  # fmt: skip
    lines = (f"{n} is followed by {n + 1}, and 3 times {n} is {3 * n}: a line of text." for n in range(900))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    small = "--tokenizer.vocab_size 400 --model.vocab_size 400 --pack.seq_len 64 --model.max_seq_len 64"
    short = "--pretrain.num_steps 3 --pretrain.batch_tokens 256 --data.validation_fraction 0"
    words = ["tiny", "--stages", "clean,tokenize,pack,pretrain", "--data.sources", "text.txt"]
    words += [*f"{small} {short}".split(), *RELAXED]
    done = subprocess.run(["bash", TRAIN_SLURM, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    info = json.loads((tmp_path / "runs/tiny/pretrain/artifact/manifest.json").read_text())
    assert info["facts"]["num_steps"] == 3
    assert info["facts"]["world_size"] == 2, info["facts"]


def test_the_kubernetes_job_trains_on_all_pods() -> None:
    service, job = yaml.safe_load_all(TRAIN_KUBERNETES.read_text())
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["modelwright", "launch"]
    options = launch_parser().parse_args(words[2:])
    config = launch_config(options)
    assert config.max_hosts == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert config.min_hosts < config.max_hosts, "the others go on without a pod that is lost"
    assert config.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    assert config.local_addr == "$(POD_IP)"
    assert "POD_IP" in [one["name"] for one in container["env"]]
    assert options.command[0] == "run"
    assert all(word.startswith("/data/") for word in options.command[1:] if "/" in word), "on the shared volume"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("path", [KUBERNETES, TRAIN_KUBERNETES], ids=lambda path: path.stem)
def test_the_kubernetes_objects_satisfy_the_schemas_of_kubernetes(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    objects = list(yaml.safe_load_all(path.read_text()))
    assert [one["kind"] for one in objects] == ["Service", "Job"]
    for one in objects:
        validate(one, "1.33", strict=True)
    broken = {**objects[1], "spec": {**objects[1]["spec"], "completion": 4}}
    with pytest.raises(Exception, match="completion"):
        validate(broken, "1.33", strict=True)


def test_the_kubernetes_job_runs_the_command_on_all_pods() -> None:
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    options, command = arguments_of_ray(container["command"])
    check_clean(command)
    read = check_ray(options)
    name = job["metadata"]["name"]
    assert read["address"] == f"{name}-0.{service['metadata']['name']}:6379", "the name of the first pod"
    assert read["min_nodes"] == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {"name": "RAY_ADDRESS", "value": "auto"} in container["env"]
    (token,) = (one for one in container["env"] if one["name"] == "RAY_AUTH_TOKEN")
    assert "value" not in token, "secrets stand in no file"
    assert read["rest"][:2] == ["--num-cpus", container["resources"]["requests"]["cpu"]]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert shlex.join(command).count("/data/") == 2, "on the volume that all pods share"
