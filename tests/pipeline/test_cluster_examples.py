"""The examples of `examples/cluster/`, checked as far as possible without a cluster."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelwright.cli.clean import parser as clean_parser
from modelwright.core.config import parse
from modelwright.core.overrides import read_overrides, split_settings
from modelwright.recipes.cleaning import CleanCommandConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SLURM, KUBERNETES = EXAMPLES / "clean_ray.sbatch", EXAMPLES / "clean_ray.yaml"
DIRECTIVES = {
    "job-name": r"[\w-]+", "nodes": r"\d+(-\d+)?", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?", "time": r"(\d+-)?\d+(:\d\d){0,2}", "output": r"[\w%./-]+",
    "exclusive": "",
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


def test_the_slurm_script_is_one() -> None:
    text = SLURM.read_text()
    assert text.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", SLURM], check=True)
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


def test_the_kubernetes_objects_satisfy_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    objects = list(yaml.safe_load_all(KUBERNETES.read_text()))
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
