"""A hub on this machine that speaks the part of the Hugging Face hub's HTTP interface that `huggingface_hub` needs to
download a model or a data set and to upload a folder. What it was asked is in `requests`.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

SHA = "5" * 40
GATED = "kept/closed"


@dataclass
class Hub:
    """Repositories by `models/OWNER/NAME` or `datasets/OWNER/NAME`, each with its files."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)

    def environment(self, home: str) -> dict[str, str]:
        """Variables with which a process asks this hub, and keeps what it downloads in the folder `home`."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": home, "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None: ...

        def reply(self, content: Any = b"", status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def files(self, kind: str, name: str) -> dict[str, bytes] | None:
            found = hub.repositories.get(f"{kind}/{name}")
            if found is None:
                code = "GatedRepo" if name == GATED else "RepoNotFound"
                self.reply({"error": code}, 403 if name == GATED else 404, X_Error_Code=code, X_Error_Message=code)
            return found

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                kind, name, what, _ = found.groups()
                if (files := self.files(kind, name)) is None:
                    return
                if what == "revision":
                    self.reply({"id": name, "sha": SHA, "siblings": [{"rfilename": one} for one in files]})
                    return
                oids = {one: hashlib.sha1(content).hexdigest() for one, content in files.items()}
                entries = [{"type": "file", "path": n, "size": len(c), "oid": oids[n]} for n, c in files.items()]
                self.reply(entries)
            elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                files = self.files("datasets" if found[1] else "models", found[2])
                if files is None:
                    return
                if (content := files.get(found[4])) is None:
                    self.reply(b"", 404, X_Error_Code="EntryNotFound", X_Error_Message="no such file")
                else:
                    self.reply(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=SHA)
            else:
                self.reply({"error": "unknown"}, 404)

        do_HEAD = do_GET

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_PUT(self) -> None:
            hub.uploads[self.path.rpartition("/")[2]] = self.body()
            self.reply(b"", ETag='"part"')

        def do_POST(self) -> None:
            hub.requests.append(f"POST {self.path}")
            body = self.body()
            if self.headers.get("Authorization") != "Bearer hf_secret":
                self.reply({"error": "no token"}, 401)
            elif self.path == "/api/repos/create":
                asked = json.loads(body)
                name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                key = f"models/{name}"
                if key in hub.repositories:
                    self.reply({"error": "exists", "url": f"{hub.url}/{name}"}, 409)
                    return
                hub.repositories[key] = {}
                hub.private |= {name} if asked.get("private") or asked.get("visibility") == "private" else set()
                self.reply({"url": f"{hub.url}/{name}", "name": name, "id": SHA})
            elif self.path == "/api/validate-yaml":
                head = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
                is_valid = head is None or isinstance(yaml.safe_load(head[1]), dict)
                self.reply({"errors": [] if is_valid else [{"message": "front matter"}], "warnings": []})
            elif "/preupload/" in self.path:
                names = [one["path"] for one in json.loads(body)["files"]]
                modes = {one: "lfs" if one.endswith(".safetensors") else "regular" for one in names}
                answer = [{"path": n, "uploadMode": mode, "shouldIgnore": False} for n, mode in modes.items()]
                self.reply({"files": answer})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**one, "actions": {"upload": {"href": f"{hub.url}/store/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                self.reply({"transfer": "basic", "objects": objects})
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path.partition("?")[0]):
                files = hub.repositories[f"models/{found[1]}"]
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = hub.uploads[value["oid"]]
                self.reply({"commitUrl": f"{hub.url}/{found[1]}/commit/{SHA}", "commitOid": SHA, "success": True})
            else:
                self.reply({"error": "unknown"}, 404)

    return Handler


@contextmanager
def running_hub() -> Generator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
