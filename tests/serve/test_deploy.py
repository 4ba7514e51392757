"""The files of examples/deploy: valid by the schemas of their systems, consistent, with a command line that works."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from modelwright.core.resources import CHECKOUT_FILES
from modelwright.serve.config import ServeConfig
from serve.conftest import write_model
from serve.test_keys import write_keys

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
CLOSE_MARGIN_S = 10
"""Seconds that the server takes after `drain_timeout_s` to cut off answers and end its engines."""


def kubernetes_objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def compose_file() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions, each with the words that follow."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def validate(objects: dict[str, Any]) -> None:
    for one in objects.values():
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


@cache
def compose_validator() -> Validator:
    """By the schema of the Compose specification, which `check-jsonschema` brings along."""
    path = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    return validator_for(schema)(schema)


def test_kubernetes_objects_are_valid_and_belong_together():
    objects = kubernetes_objects()
    assert set(objects) == {"Deployment", "Service", "PodDisruptionBudget"}
    validate(objects)
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    labels = spec["template"]["metadata"]["labels"].items()
    for selector in (
        spec["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector
        assert selector.items() <= labels
    (port,) = container["ports"]
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert f"--port={port['containerPort']}" in container["args"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: get["path"] for name, get in probes.items()} == {
        "startup": "/livez", "liveness": "/livez", "readiness": "/readyz"
    }  # fmt: skip
    assert all(get["port"] == port["name"] for get in probes.values())
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= ServeConfig().drain_timeout_s + pause_s + CLOSE_MARGIN_S
    assert {"name": "OMP_NUM_THREADS", "value": container["resources"]["limits"]["cpu"]} in container["env"]
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "secrets")
    (volume,) = (one for one in pod["volumes"] if one["name"] == "secrets")
    (item,) = volume["secret"]["items"]
    assert volume["secret"]["defaultMode"] == 0o440
    assert f"--keys_file={mount['mountPath']}/{item['path']}" in container["args"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    (user,) = (rest for name, rest in dockerfile() if name == "USER")
    assert user == f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"


@pytest.mark.parametrize(
    "path", [("replica",), ("template", "spec", "terminationGracePeriod"), ("strategy", "rollingUpdate", "maxSurges")]
)
def test_the_validation_finds_a_wrong_field(path):
    objects = kubernetes_objects()
    place = objects["Deployment"]["spec"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(objects)


def test_the_compose_file_is_valid_and_fits_its_image():
    file = compose_file()
    compose_validator().validate(file)
    (service,) = file["services"].values()
    assert int(service["stop_grace_period"].removesuffix("s")) >= ServeConfig().drain_timeout_s + CLOSE_MARGIN_S
    (port,) = service["ports"]
    assert f"--port={port['target']}" in service["command"]
    (secret,) = service["secrets"]
    assert secret["source"] in file["secrets"]
    assert f"--keys_file={secret['target']}" in service["command"]
    assert service["environment"]["OMP_NUM_THREADS"] == service["deploy"]["resources"]["limits"]["cpus"]
    build = service["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DEPLOY / "Dockerfile"
    copied = {found[1] for name, rest in dockerfile() if name == "COPY" and (found := re.search(r"--from=(\S+)", rest))}
    assert copied == set(build["additional_contexts"])
    (exposed,) = (rest for name, rest in dockerfile() if name == "EXPOSE")
    assert int(exposed) == port["target"]


@pytest.mark.parametrize(
    ("place", "value"),
    [("stop_grace", "9s"), ("ports", [{"targets": 1}]), ("healthcheck", {"tests": []}), ("read_only", {"a": 1})],
)
def test_the_schema_of_compose_finds_a_wrong_field(place, value):
    file = compose_file()
    file["services"]["modelwright"][place] = value
    with pytest.raises(ValidationError):
        compose_validator().validate(file)


def test_the_image_has_the_package_of_this_source_tree():
    """On PyPI the package's name belongs to another project."""
    own = [rest.split() for name, rest in dockerfile() if name == "COPY" and "--from" not in rest]
    sources = {source for *copied, _ in own for source in copied}
    assert sources == {*CHECKOUT_FILES, "src"}
    assert all((ROOT / source).exists() for source in sources)
    text = "\n".join(path.read_text() for path in DEPLOY.iterdir() if path.is_file())
    assert not re.search(r"install.*[\s\"']modelwright\b(?!\[)", text)
    (named,) = re.findall(r'"/source\[([\w,-]+)\]', text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(named.split(",")) <= set(known)


def test_the_command_of_a_container_serves_and_stops(tmp_path, free_port):
    """The words after the image's entry point, with this machine's paths in place of the container's."""
    folder = write_model(tmp_path / "model", seed=7)
    keys_file = write_keys(tmp_path / "own keys.yaml", user={})
    (service,) = compose_file()["services"].values()
    (container,) = kubernetes_objects()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == service["command"], "one run shows both"
    (entry,) = (json.loads(rest) for name, rest in dockerfile() if name == "ENTRYPOINT")
    assert entry == ["modelwright", "serve", "/model"]
    places = {"/etc/modelwright/keys.yaml": keys_file, "0.0.0.0": "127.0.0.1", "--port=8000": f"--port={free_port}"}
    command = service["command"]
    for there, here in places.items():
        assert any(there in word for word in command)
        command = [word.replace(there, here) for word in command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    kind, _, *probe = service["healthcheck"]["test"]
    assert kind == "CMD"
    probe = [word.replace("8000", str(free_port)) for word in probe]
    with subprocess.Popen(
        [sys.executable, "-m", "modelwright.cli.main", "serve", str(folder), *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert "Serving chat" in process.stdout.readline()
            assert subprocess.run([sys.executable, *probe], timeout=60, check=False).returncode == 0
            process.send_signal(getattr(signal, service["stop_signal"]))
            _, errors = process.communicate(timeout=int(service["stop_grace_period"].removesuffix("s")))
        finally:
            process.kill()
    assert process.returncode == 143, errors
    assert subprocess.run([sys.executable, *probe], stderr=subprocess.DEVNULL, check=False).returncode != 0
