"""A double of the hub on loopback: repositories, commits and large files, as its HTTP API documents them."""

import base64
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class HubDouble:
    """The double and its contents: `files` by repository and path; `refuse` maps the start of a path to a status."""

    token: str = "hf_doubletoken"
    refuse: dict[str, int] = field(default_factory=dict)
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "HubDouble":
        double = self

        class Bound(_Handler):
            hub = double

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of a request."""
        for start, status in self.refuse.items():
            if path.startswith(start):
                return status, {"error": f"the double refuses {self.token}"}
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.repositories.setdefault(name, wanted)
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if parts[0] == "api" and parts[4:5] == ["preupload"]:
            return 200, {"files": [self._choose_mode(file) for file in json.loads(body)["files"]]}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [
                    {**entry, "actions": {"upload": {"href": f"{self.url}/store/{entry['oid']}"}}}
                    for entry in json.loads(body)["objects"]
                ],
            }
        if parts[0] == "store":
            self.objects[parts[1]] = body
            return 200, {}
        if parts[0] == "api" and parts[4:5] == ["commit"]:
            name = "/".join(parts[2:4])
            self._commit(name, [json.loads(line) for line in body.splitlines()])
            oid = f"{self.commits:040x}"
            return 200, {
                "success": True,
                "commitUrl": f"{self.url}/{name}/commit/{oid}",
                "commitOid": oid,
            }
        return 404, {"error": f"the double knows no {path}"}

    @staticmethod
    def _choose_mode(file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        self.commits += 1
        files = self.files.setdefault(name, {})
        for line in lines:
            entry = line["value"]
            if line["key"] == "file":
                files[entry["path"]] = base64.b64decode(entry["content"])
            elif line["key"] == "lfsFile":
                files[entry["path"]] = self.objects[entry["oid"]]


class _Handler(BaseHTTPRequestHandler):
    hub: HubDouble

    def _answer(self) -> None:
        body = self._read_body()
        path = self.path.partition("?")[0]
        is_open = path.startswith("/store/") or path == "/api/validate-yaml"
        if not is_open and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(401, {"error": "Invalid credentials"})
        self._send(*self.hub.answer(path, body))

    do_GET = do_POST = do_PUT = _answer

    def _read_body(self) -> bytes:
        """Return the body, which is chunked if a file is streamed."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
