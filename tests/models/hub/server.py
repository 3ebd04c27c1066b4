"""A Hub of one's own: enough of its protocol for the real client to push to and pull from.

Repositories, branches and commits are kept in memory, large files by their hash. `cut` makes the
next transfers break off in the middle, as a lost connection does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_test"
LARGE = 4096


@dataclass(slots=True)
class Repo:
    """Commits are whole trees: path -> content, or the hash of a large file."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes | str]] = field(default_factory=dict)

    def commit(self, branch: str, tree: dict[str, bytes | str]) -> str:
        sha = hashlib.sha1(f"{branch}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = tree
        self.branches[branch] = sha
        return sha

    def find(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


@dataclass(slots=True)
class Hub:
    """The state of the server. `cut`: how many of the next transfers of large files (GET, PUT) or
    commits (COMMIT) break off, and before how many commits somebody else makes one (RIVAL); `sent`:
    bytes of large files that came in or went out.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    chunk: int | None = None
    cut: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tree(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a revision."""
        found = self.repos[repo]
        sha = found.find(revision)
        assert sha is not None
        tree = found.commits[sha]
        return {n: self.large[c] if isinstance(c, str) else c for n, c in tree.items()}

    def breaks(self, method: str) -> bool:
        with self.lock:
            self.cut[method] -= 1
            return self.cut[method] >= 0


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One request of the client."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._route()

    do_HEAD = do_POST = do_PUT = do_GET

    def _route(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        self.query = parse_qs(url.query)
        if parts[0] == "objects":
            self._object(parts[1])
            return
        body = self._body()
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid credentials"}, 401)
        elif parts[:2] == ["api", "repos"]:
            self._create(json.loads(body))
        elif parts[:2] == ["api", "validate-yaml"]:
            self._validate(json.loads(body)["content"])
        elif parts[:2] == ["api", "models"]:
            self._models(f"{parts[2]}/{parts[3]}", parts[4:], body)
        elif parts[2:5] == ["info", "lfs", "objects"]:
            self._batch(json.loads(body))
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._json({"error": f"no such route {self.path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repos:
            self._json({"error": "You already created this model repo"}, 409)
            return
        repo = Repo(private=asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.hub.repos[name] = repo
        self._json({"url": f"{self.hub.url}/{name}"})

    def _validate(self, content: str) -> None:
        front = content.split("---\n")[1]
        good = isinstance(yaml.safe_load(front), dict)
        self._json({"errors": [] if good else [{"message": "bad"}], "warnings": []})

    def _models(self, name: str, rest: list[str], body: bytes) -> None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._missing("RepoNotFound", f"Repository {name} not found")
            return
        kind, revision = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
        if kind == "branch":
            repo.branches[revision] = repo.branches["main"]
            self._json({}, 201)
            return
        sha = repo.find(revision)
        if sha is None:
            self._missing("RevisionNotFound", f"Revision {revision} not found")
        elif kind == "revision":
            self._json({"id": name, "sha": sha, "private": repo.private, "siblings": []})
        elif kind == "tree":
            self._json([self._entry(path, held) for path, held in repo.commits[sha].items()])
        elif kind == "preupload":
            files = json.loads(body)["files"]
            self._json({"files": [self._mode(repo.commits[sha], one) for one in files]})
        elif kind == "commit":
            if self.hub.breaks("COMMIT"):
                self._hang_up()
                return
            if self.hub.breaks("RIVAL"):
                repo.commit(revision, {"README.md": b"theirs"})
            self._commit(repo, revision, body)

    def _entry(self, path: str, held: bytes | str) -> dict[str, Any]:
        content = self.hub.large[held] if isinstance(held, str) else held
        entry = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
        if isinstance(held, str):
            entry["lfs"] = {"oid": held, "size": len(content), "pointerSize": 134}
        return entry

    def _mode(self, tree: dict[str, bytes | str], asked: dict[str, Any]) -> dict[str, Any]:
        held = tree.get(asked["path"])
        oid = held if isinstance(held, str) or held is None else git_sha1(held)
        mode = "lfs" if asked["size"] > LARGE else "regular"
        return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _commit(self, repo: Repo, branch: str, body: bytes) -> None:
        sha = repo.branches[branch]
        tree = dict(repo.commits[sha])
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "header" and value.get("parentCommit", sha) != sha:
                self._json({"error": "A commit has happened since."}, 412)
                return
            if one["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                assert value["oid"] in self.hub.large
                tree[value["path"]] = value["oid"]
            elif one["key"] == "deletedFile":
                del tree[value["path"]]
        new = repo.commit(branch, tree)
        name = next(name for name, one in self.hub.repos.items() if one is repo)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{new}", "commitOid": new})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            oid, size = one["oid"], one["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.large:
                upload: dict[str, Any] = {"href": f"{self.hub.url}/objects/{oid}"}
                if self.hub.chunk is not None:
                    count = -(-size // self.hub.chunk)
                    parts = {str(n): f"{upload['href']}?part={n}" for n in range(1, count + 1)}
                    upload["header"] = {"chunk_size": str(self.hub.chunk), **parts}
                answer["actions"] = {"upload": upload}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def _object(self, oid: str) -> None:
        """A large file, whole or in parts; POST says that all parts are there."""
        if self.command == "POST":
            self._body()
            whole = b"".join(content for _, content in sorted(self.hub.parts.pop(oid).items()))
        else:
            if self.hub.breaks("PUT"):
                self.hub.sent["in"] += len(self.rfile.read(LARGE // 2))
                self._hang_up()
                return
            whole = self._body()
            self.hub.sent["in"] += len(whole)
            if "part" in self.query:
                part = int(self.query["part"][0])
                self.hub.parts.setdefault(oid, {})[part] = whole
                self._answer(b"", {"ETag": f'"{part}"'})
                return
        assert hashlib.sha256(whole).hexdigest() == oid
        self.hub.large[oid] = whole
        self._answer(b"", {})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.hub.repos.get(name)
        sha = repo.find(revision) if repo is not None else None
        if repo is None or sha is None or path not in repo.commits[sha]:
            self._missing("EntryNotFound", f"{path} not found")
            return
        held = repo.commits[sha][path]
        content = self.hub.large[held] if isinstance(held, str) else held
        headers = {"X-Repo-Commit": sha, "ETag": f'"{git_sha1(content)}"'}
        if isinstance(held, str):
            headers |= {"X-Linked-Etag": f'"{held}"', "X-Linked-Size": str(len(content))}
        status, start = 200, 0
        if "range" in self.headers:
            self.hub.ranges.append(self.headers["range"])
            start = int(self.headers["range"].removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status = 206
        large = isinstance(held, str) and self.command == "GET"
        half = (len(content) - start) // 2 if large and self.hub.breaks("GET") else None
        if large:
            self.hub.sent["out"] += len(content) - start if half is None else half
        self._answer(content[start:], headers, status, half)

    def _missing(self, code: str, said: str) -> None:
        self._json({"error": said}, 404, {"X-Error-Code": code, "X-Error-Message": said})

    def _json(self, value: Any, status: int = 200, more: dict[str, str] | None = None) -> None:
        headers = {"Content-Type": "application/json", **(more or {})}
        self._answer(json.dumps(value).encode(), headers, status)

    def _answer(
        self,
        content: bytes,
        headers: dict[str, str],
        status: int = 200,
        only: int | None = None,
    ) -> None:
        """`only` so many bytes of the content arrive, then the line is dead."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:only])
        if only is not None:
            self._hang_up()

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def serve() -> tuple[Hub, ThreadingHTTPServer]:
    """A running server on a free port of this machine."""
    hub = Hub()
    handler = type("OneHub", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return hub, server
