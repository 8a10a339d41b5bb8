"""A stand-in for the Hub: the part of its HTTP API that uploads and downloads use, and what it refuses.

It keeps what it receives. Refused are: no token or an unknown one, a token that may only read, names of repositories
that the Hub does not take, namespaces of others, and cards whose metadata is no YAML, too long, or names data sets and
models that cannot exist. All files are small ones to it, which are sent in the commit.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

USER, TOKEN, READ_TOKEN = "ada", "hf_" + "w" * 34, "hf_" + "r" * 34
MAX_METADATA = 60_000
"""Characters at the top of a card."""
_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?")
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w-]*(?:/[A-Za-z0-9][\w.-]*)?")


class Hub:
    """What the stand-in holds."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {}
        """(type, id) -> path -> bytes."""
        self.private: set[str] = set()
        self.requests: list[str] = []
        self.url = ""
        self.broken: str | None = None
        """A path whose requests are answered with `broken_status`."""
        self.broken_status = 500

    def files(self, repo_id: str, repo_type: str = "model") -> dict[str, bytes]:
        return self.repos[(repo_type, repo_id)]


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "", **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.more = more


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A stand-in on a port of this machine, while it lasts."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _check_card(content: str, repo_type: str) -> None:
    match = re.match(r"---\n(.*?)\n---", content, re.DOTALL)
    if match is None:
        return  # the Hub warns only
    problems = []
    if len(match.group(1)) > MAX_METADATA:
        problems.append("metadata is too long")
    try:
        data = yaml.safe_load(match.group(1))
    except yaml.YAMLError as error:
        raise Refused(400, "Invalid YAML", errors=[{"message": f"bad YAML: {error}"}]) from error
    for name in ("datasets", "base_model"):
        values = data.get(name) or []
        for value in values if isinstance(values, list) else [values]:
            if not _DATASET_ID.fullmatch(str(value)):
                problems.append(f'"{name}" with value "{value}" is not valid. Use an id from https://hf.co.')
    tags = data.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        problems.append('"tags" must be an array of strings')
    if repo_type == "dataset":
        for config in data.get("configs") or []:
            if not config.get("config_name") or not config.get("data_files"):
                problems.append('"configs[0]" needs config_name and data_files')
    if problems:
        raise Refused(400, "Invalid metadata", errors=[{"message": text} for text in problems])


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        body = self._body()
        try:
            if self.hub.broken and self.hub.broken in path:
                raise Refused(self.hub.broken_status, "Try Again")
            status, content, headers = self._route(path, body)
        except Refused as refused:
            status, headers = refused.status, {"X-Error-Message": refused.message}
            headers |= {"X-Error-Code": refused.code} if refused.code else {}
            content = json.dumps({"error": refused.message, **refused.more}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = _answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _route(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if self.command in ("GET", "HEAD"):
            return self._download(path)
        data = json.loads(body) if body[:1] == b"{" and not path.rpartition("/")[0].endswith("/commit") else {}
        if path == "/api/validate-yaml":
            _check_card(data["content"], data["repoType"])
            return self._json({"errors": [], "warnings": []})
        if path == "/api/telemetry":
            return self._json({})
        self._check_token()
        if path == "/api/repos/create":
            return self._create(data)
        if match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/(preupload|commit)/main", path):
            repo = self._repo(match[1], match[2])
            return self._preupload(data) if match[3] == "preupload" else self._commit(repo, body, match[1], match[2])
        raise Refused(404, f"no such address: {path}")

    def _json(self, value: Any) -> tuple[int, bytes, dict[str, str]]:
        return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}

    def _check_token(self) -> None:
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given not in (TOKEN, READ_TOKEN):
            raise Refused(401, "Invalid username or password.")
        if given == READ_TOKEN:
            raise Refused(403, 'You don\'t have the rights to create a model under the namespace "ada"')

    def _repo(self, kind: str, repo_id: str) -> dict[str, bytes]:
        try:
            return self.hub.repos[(kind, repo_id)]
        except KeyError:
            raise Refused(404, "Repository not found", "RepoNotFound") from None

    def _create(self, data: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        owner = data.get("organization") or USER
        name = data["name"]
        kind = data.get("type") or "model"
        if not _NAME.fullmatch(name) or "--" in name or ".." in name or name.endswith(".git"):
            raise Refused(400, f"Invalid repo name: {name}")
        if owner != USER:
            raise Refused(403, f'You don\'t have the rights to create a {kind} under the namespace "{owner}"')
        repo_id = f"{owner}/{name}"
        prefix = "datasets/" if kind == "dataset" else ""
        url = f"{self.hub.url}/{prefix}{repo_id}"
        if (kind, repo_id) in self.hub.repos:
            raise Refused(409, "You already created this repo", url=url)
        self.hub.repos[(kind, repo_id)] = {}
        if data.get("private") or data.get("visibility") == "private":
            self.hub.private.add(repo_id)
        return self._json({"url": url, "name": repo_id, "id": "1"})

    def _preupload(self, data: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        files = [{"path": item["path"], "uploadMode": "regular", "shouldIgnore": False} for item in data["files"]]
        return self._json({"files": files})

    def _commit(
        self, repo: dict[str, bytes], body: bytes, kind: str, repo_id: str
    ) -> tuple[int, bytes, dict[str, str]]:
        new: dict[str, bytes] = {}
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                if not value.get("summary"):
                    raise Refused(400, "a commit needs a summary")
                continue
            if value["path"].startswith("/") or ".." in value["path"].split("/"):
                raise Refused(400, f"invalid path {value['path']}")
            if item["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
        if "README.md" in new:
            _check_card(new["README.md"].decode(), kind)
        repo |= new
        oid = hashlib.sha1(body).hexdigest()
        url = f"{self.hub.url}/{'datasets/' if kind == 'dataset' else ''}{repo_id}/commit/{oid}"
        return self._json({"success": True, "commitUrl": url, "commitOid": oid})

    def _download(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            files = self._repo("dataset" if match[1] else "model", match[2])
            if match[3] not in files:
                raise Refused(404, "Entry not found", "EntryNotFound")
            content = files[match[3]]
            etag = hashlib.sha256(content).hexdigest()
            return 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": "a" * 40, "Accept-Ranges": "none"}
        if match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            files = self._repo(match[1], match[2])
            siblings = [{"rfilename": name} for name in files]
            about = {"id": match[2], "modelId": match[2], "private": match[2] in self.hub.private, "sha": "a" * 40}
            return self._json(about | {"siblings": siblings, "tags": []})
        if match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?", path):
            is_recursive = "recursive=true" in self.path.lower()
            return self._json(_tree(self._repo(match[1], match[2]), match[3] or "", is_recursive=is_recursive))
        raise Refused(404, f"no such address: {path}")


def _tree(files: dict[str, bytes], folder: str, *, is_recursive: bool) -> list[dict[str, Any]]:
    """The files and folders in a folder; with `is_recursive` those inside its folders, too."""
    beginning = f"{folder}/" if folder else ""
    found: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        rest = name.removeprefix(beginning).split("/")
        if not name.startswith(beginning):
            continue
        for depth in range(1, len(rest)):
            path = beginning + "/".join(rest[:depth])
            found[path] = {
                "type": "directory",
                "path": path,
                "size": 0,
                "oid": hashlib.sha1(path.encode()).hexdigest(),
            }
        found[name] = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if not found:
        raise Refused(404, "Entry not found", "EntryNotFound")
    return [item for path, item in found.items() if is_recursive or "/" not in path.removeprefix(beginning)]
