"""Manifests: valid by the schemas of their systems, with secrets only by reference, and a command line that works."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
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

from modelwright.cli.main import main
from modelwright.core import checkout
from modelwright.core.errors import ConfigError
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines import BACKENDS
from modelwright.serve.load import ModelSource
from modelwright.serve.manifests.deployment import PORT, Needs, deployment_of
from modelwright.serve.manifests.kinds import KINDS, write_manifests
from modelwright.serve.requests_config import RequestsConfig
from serve.conftest import write_model
from serve.test_keys import write_keys

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = {"FROM", "ARG", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"}
KEY = "hush-hush"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "Tiny_1", seed=7)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_keys(tmp_path_factory.mktemp("keys") / "own keys.yaml", user={}))


def write(out: Path, *words: str) -> dict[str, Any]:
    """Run the command; returns the documents of the YAML file by kind, or the Compose file."""
    assert main(["manifests", *words, "--out", str(out)]) == 0
    if "compose" in words:
        return yaml.safe_load((out / "compose.yaml").read_text())
    return {one["kind"]: one for one in yaml.safe_load_all((out / "kubernetes.yaml").read_text())}


@cache
def compose_validator() -> Validator:
    """By the schema of the Compose specification, which `check-jsonschema` brings along."""
    path = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    return validator_for(schema)(schema)


def container_of(objects: dict[str, Any]) -> dict[str, Any]:
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container


def seconds(duration: str) -> float:
    found = re.fullmatch(r"([\d.]+)s", duration)
    assert found
    return float(found[1])


def validate(objects: dict[str, Any]) -> None:
    for one in objects.values():
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_objects_are_valid_and_belong_together(folder, keys_file, tmp_path, capsys):
    words = [str(folder), "--for", "kubernetes", "--replicas", "3", "--cpus", "4", "--memory", "3GiB", "--engines", "2"]
    settings = ["--keys_file", str(keys_file), "--drain_timeout_s", "45.5", "--api_key_env", ""]
    objects = write(tmp_path, *words, *settings, "--served-model-name", "Tiny_1")
    assert set(objects) == {"Deployment", "Service", "PodDisruptionBudget"}
    validate(objects)
    spec, container = objects["Deployment"]["spec"], container_of(objects)
    labels = spec["template"]["metadata"]["labels"].items()
    for selector in (
        spec["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    assert {one["metadata"]["name"] for one in objects.values()} == {"tiny-1"}
    (port,) = container["ports"]
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert f"--port={port['containerPort']}" in container["args"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: get["path"] for name, get in probes.items()} == {
        "startup": "/livez", "liveness": "/livez", "readiness": "/readyz"
    }  # fmt: skip
    assert all((get["port"], get["scheme"]) == (port["name"], "HTTP") for get in probes.values())
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 45.5 + pause_s + 5
    assert container["resources"]["limits"] == {"cpu": "4", "memory": str(3 * 2**30)}
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in container["env"]
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "secrets")
    (volume,) = (one for one in spec["template"]["spec"]["volumes"] if one["name"] == "secrets")
    (item,) = volume["secret"]["items"]
    assert f"--keys_file={mount['mountPath']}/{item['path']}" in container["args"]
    from_file = shlex.quote(f"--from-file={item['key']}={keys_file}")
    assert f"kubectl create secret generic {volume['secret']['secretName']} {from_file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", [("replica",), ("template", "spec", "terminationGracePeriod"), ("strategy", "rollingUpdate", "maxSurges")]
)
def test_the_validation_finds_a_wrong_field(path, folder, tmp_path):
    objects = write(tmp_path, str(folder), "--for", "kubernetes")
    validate(objects)
    place = objects["Deployment"]["spec"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(objects)


def test_compose_file_fits_its_image(folder, keys_file, tmp_path):
    words = [str(folder), "--for", "compose", "--keys_file", str(keys_file), "--host", "127.0.0.1", "--port", "9001"]
    file = write(tmp_path, *words, "--drain_timeout_s", "12", "--requests.log", "env:LOG_URL")
    compose_validator().validate(file)
    (service,) = file["services"].values()
    assert seconds(service["stop_grace_period"]) >= 12 + 5
    assert service["ports"] == [{"target": PORT, "published": "9001", "host_ip": "127.0.0.1", "protocol": "tcp"}]
    assert service["environment"]["LOG_URL"] == "${LOG_URL:?set LOG_URL}"
    assert file["secrets"] == {"keys.yaml": {"file": str(keys_file)}}
    (secret,) = service["secrets"]
    assert f"--keys_file={secret['target']}" in service["command"]
    assert service["user"].split(":")[0] != "0"
    contexts = {name: Path(path) for name, path in service["build"]["additional_contexts"].items()}
    assert contexts["model"] == folder
    check_dockerfile(tmp_path / "Dockerfile", contexts, extras={"structured", "requests-log"})


@pytest.mark.parametrize(
    ("place", "value"),
    [("stop_grace", "9s"), ("ports", [{"targets": 1}]), ("healthcheck", {"tests": []}), ("read_only", {"a": 1})],
)
def test_the_schema_of_compose_finds_a_wrong_field(place, value, folder, tmp_path):
    file = write(tmp_path, str(folder), "--for", "compose")
    compose_validator().validate(file)
    file["services"]["modelwright"][place] = value
    with pytest.raises(ValidationError):
        compose_validator().validate(file)


def check_dockerfile(path: Path, contexts: dict[str, Path], *, extras: set[str]) -> None:
    """Its instructions exist, what it copies is there, and the extras are those of the package."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    instructions = [line.split(maxsplit=1) for line in lines]
    assert {name for name, _ in instructions} <= INSTRUCTIONS
    assert instructions[0][0] == "FROM"
    copied = set()
    for name, rest in instructions:
        if name == "COPY":
            *options, words = re.split(r"(?<=\S) (?!--)", rest, maxsplit=1) if rest.startswith("--") else ["", rest]
            flags = dict(flag[2:].split("=") for flag in " ".join(options).split())
            *sources, target = words.split()
            assert target.startswith("/")
            assert all((contexts[flags["from"]] / source).exists() for source in sources)
            copied.add(flags["from"])
    assert copied == set(contexts), "a context that nothing uses"
    (entry,) = (json.loads(rest) for name, rest in instructions if name == "ENTRYPOINT")
    assert entry[:2] == ["modelwright", "serve"]
    (named,) = re.findall(r'"/source\[([\w,-]+)\]', path.read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(named.split(",")) == extras <= set(known)


@pytest.mark.parametrize("kind", ["compose", "kubernetes"])
def test_an_image_is_refused_without_a_source_tree(kind, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "lib/site-packages/modelwright/core/checkout.py"))
    assert main(["manifests", str(folder), "--for", kind, "--out", str(tmp_path / "out")]) == 2
    assert "--for: needs the source tree of this package" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_installs_the_package_by_its_name(kind, folder, tmp_path):
    assert main(["manifests", str(folder), "--for", kind, "--out", str(tmp_path)]) == 0
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts
    assert not [line for text in texts for line in text.splitlines() if re.search(r"install.*[\s\"']modelwright", line)]


def test_the_command_of_a_container_serves_and_stops(folder, keys_file, tmp_path, free_port):
    """The words after the image's entry point, with this machine's paths in place of the container's."""
    words = [str(folder), "--for", "compose", "--keys_file", str(keys_file), "--engine.max_num_seqs", "4"]
    words += ["--model_aliases", "it's $HOME", "other", "--cors_origins", "https://example.com", "--log_format", "json"]
    (service,) = write(tmp_path, *words)["services"].values()
    places = {"/etc/modelwright/keys.yaml": str(keys_file), "0.0.0.0": "127.0.0.1"}
    places |= {f"--port={PORT}": f"--port={free_port}"}
    command = [word.replace("$$", "$") for word in service["command"]]
    for there, here in places.items():
        assert any(there in word for word in command)
        command = [word.replace(there, here) for word in command]
    environment = os.environ | {**service["environment"], "OMP_NUM_THREADS": "1"}
    probe = [word.replace(str(PORT), str(free_port)) for word in service["healthcheck"]["test"][2:]]
    with subprocess.Popen(
        [sys.executable, "-m", "modelwright.cli.main", "serve", str(folder), *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert "Serving Tiny_1" in process.stdout.readline()
            assert subprocess.run([sys.executable, *probe], timeout=60, check=False).returncode == 0
            process.send_signal(getattr(signal, service["stop_signal"]))
            _, errors = process.communicate(timeout=seconds(service["stop_grace_period"]))
        finally:
            process.kill()
    assert process.returncode == 143, errors
    assert subprocess.run([sys.executable, *probe], stderr=subprocess.DEVNULL, check=False).returncode != 0
    assert '"route": "/readyz"' in errors


def test_secrets_are_in_no_file(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", KEY)
    for kind in ("compose", "kubernetes"):
        write(tmp_path / kind, str(folder), "--for", kind, "--api_key_env", "MY_KEY")
        texts = [path.read_text() for path in (tmp_path / kind).iterdir()]
        assert len(texts) == 2
        assert not any(KEY in text for text in texts)
        assert any("MY_KEY" in text for text in texts)
    output = capsys.readouterr().out
    assert KEY not in output
    assert '--from-literal=MY_KEY="$MY_KEY"' in output


def test_tls_is_probed_and_mounted(folder, tmp_path):
    for name in ("c.pem", "k.pem"):
        (tmp_path / name).write_text("certificate")
    files = ["--tls_certificate", str(tmp_path / "c.pem"), "--tls_key", str(tmp_path / "k.pem")]
    objects = write(tmp_path / "out", str(folder), "--for", "kubernetes", *files)
    validate(objects)
    assert container_of(objects)["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert {"--tls_certificate=/etc/modelwright/tls.crt", "--tls_key=/etc/modelwright/tls.key"} <= set(
        container_of(objects)["args"]
    )
    assert objects["Service"]["spec"]["ports"][0]["port"] == 443


def test_adapters_are_in_the_image(folder, tmp_path):
    """Each its own, whatever its name has: Docker's names of contexts and paths have no spaces."""
    places = {name: tmp_path / f"${number}" for number, name in enumerate(("Po_et", "po-et", "a poet"))}
    for place in places.values():
        place.mkdir()
    adapters = [f"{name}={place}" for name, place in places.items()]
    words = [str(folder), "--for", "compose", "--adapters", *adapters, "--model_aliases", "bard=Po_et"]
    (service,) = write(tmp_path / "out", *words)["services"].values()
    escaped = service["build"]["additional_contexts"]
    assert not any("$" in path.replace("$$", "") for path in escaped.values()), "Compose replaces variables"
    contexts = {name: Path(path.replace("$$", "$")) for name, path in escaped.items()}
    text = (tmp_path / "out/Dockerfile").read_text()
    at = service["command"].index("--adapters") + 1
    found = dict(word.rsplit("=", 1) for word in service["command"][at : at + 3])
    copies = {path: name for name, path in re.findall(r"COPY --from=(\S+) --chmod=755 \. (.+)", text)}
    assert {name: contexts[copies[path]] for name, path in found.items()} == places
    check_dockerfile(tmp_path / "out/Dockerfile", contexts, extras={"structured"})


def test_dollars_in_settings_reach_the_server_in_kubernetes(folder, tmp_path):
    """Kubernetes makes $$ one $, and replaces $(NAME) only after a $ that is left."""
    names = ["a$$b", "$(HOME)", "$$(HOME)"]
    args = container_of(write(tmp_path, str(folder), "--for", "kubernetes", "--model_aliases", *names))["args"]
    at = args.index("--model_aliases") + 1
    assert [re.sub(r"\$\$", "$", word) for word in args[at : at + 3]] == names
    assert not any("$" in word.replace("$$", "") for word in args)


def test_another_back_end_is_installed_and_named(folder, tmp_path):
    (service,) = write(tmp_path, str(folder), "--for", "compose", "--backend", "openvino:q8_0")["services"].values()
    assert "--backend=openvino:q8_0" in service["command"]
    contexts = {name: Path(path) for name, path in service["build"]["additional_contexts"].items()}
    check_dockerfile(tmp_path / "Dockerfile", contexts, extras={"structured", "openvino"})


def test_what_a_container_cannot_keep_is_refused(folder, tmp_path, monkeypatch):
    source = ModelSource(name="tiny", folder=folder)

    def attempt(kind: str, needs: Needs, requests: RequestsConfig, config: ServeConfig) -> None:
        found = deployment_of(source, config, requests, model_name="tiny", needs=needs)
        write_manifests(found, kind, tmp_path / "out")

    def refused(kind="compose", *, needs=Needs(), requests=RequestsConfig(), **settings) -> str:  # noqa: B008
        with pytest.raises(ConfigError) as raised:
            attempt(kind, needs, requests, ServeConfig(**settings))
        assert not (tmp_path / "out").exists()
        return str(raised.value)

    assert refused(requests=RequestsConfig(log="log.sqlite")).startswith("requests.log: a file in a container")
    assert refused(requests=RequestsConfig(ab_state="ab.sqlite")).startswith("requests.ab_state: ")
    assert refused(keys_file=str(tmp_path / "absent")).startswith("keys_file: ")
    assert refused(api_key_env="MY-KEY;id").startswith("api_key_env: 'MY-KEY;id' is no name")
    assert refused(requests=RequestsConfig(log="env:")).startswith("requests.log: '' is no name")
    for kind in ("compose", "kubernetes", "ray"):
        found = refused(kind, requests=RequestsConfig(traces=f"http://me:{KEY}@collector:4318"))
        assert found.startswith("requests.traces: ")
        assert KEY not in found
    assert refused(backend="nope").startswith("--backend: 'nope' is unknown")
    assert refused(backend="openvino:int3").startswith("--backend: 'openvino:int3': choose weights from f16")
    assert refused(backend="modelwright:f16").endswith("write modelwright")
    monkeypatch.setitem(BACKENDS, "cards", replace(BACKENDS["openvino"], needs_gpu=True))
    assert refused(backend="cards").startswith("--backend: cards needs a GPU")
    assert refused(needs=Needs(replicas=2)).startswith("--replicas: Compose runs one server")
    with pytest.raises(ConfigError, match="--replicas: must be at least 1"):
        Needs(replicas=0)


def test_other_files_are_not_replaced(folder, tmp_path, capsys):
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    assert main(["manifests", str(folder), "--for", "compose", "--out", str(tmp_path)]) == 2
    assert "Dockerfile was not written by this command" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["Dockerfile"]
    (tmp_path / "Dockerfile").unlink()
    for memory in ("2GiB", "3GiB"):
        file = write(tmp_path, str(folder), "--for", "compose", "--memory", memory)
    assert file["services"]["modelwright"]["deploy"]["resources"]["limits"]["memory"] == str(3 * 2**30)
    assert main(["manifests", str(folder), "--for", "nomad", "--out", str(tmp_path)]) == 2
    assert "choose from compose, kubernetes" in capsys.readouterr().err
    assert main(["manifests", str(folder), "--for", "compose", "--out", str(tmp_path), "--memory", "much"]) == 2
    assert "--memory: 'much' is no size" in capsys.readouterr().err
