# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Hub on loopback: model repositories, commits, revisions, large files, tokens, and faults on demand.

It answers what `huggingface_hub` asks over HTTP, in the standard library alone and in memory, so that everything that
is pushed and loaded goes through the real client. Large files are Git LFS objects on another host name
(`localhost`, not `127.0.0.1`), which refuses any request that brings a token, as signed addresses do. There is no
Xet: clients that have `hf_xet` installed need `HF_HUB_DISABLE_XET=1` to upload.

    with HubServer() as hub:
        subprocess.run([sys.executable, "push.py"], env={**os.environ, **hub.environment("folder/for/the/cache")})
        print(hub.files("me/catalogue"))
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_NAMES = (".bin", ".gguf", ".safetensors")  # LFS objects, as .gitattributes says


@dataclass(frozen=True)
class File:
    """Contents, and whether they are an LFS object."""

    data: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        """What the Hub knows the contents by: SHA-256 of large files, git's SHA-1 of others."""
        if self.is_large:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


class Commit(NamedTuple):
    """All files at one moment, by path."""

    files: dict[str, File]
    title: str


@dataclass
class Repository:
    """Commits by id, and by the names of branches, tags and pull requests."""

    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> str:
        """The commit that a name or an id means."""
        if (oid := self.names.get(revision, revision)) not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
        return oid

    def add(self, files: dict[str, File], title: str) -> str:
        """Keep a commit that no name points to yet."""
        oid = hashlib.sha1(json.dumps([len(self.commits), sorted(files), title]).encode()).hexdigest()
        self.commits[oid] = Commit(files, title)
        return oid


@dataclass
class Request:
    """What was asked."""

    method: str
    path: str  # unquoted, without the query
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Fault:
    """What goes wrong with requests of one kind, for some times."""

    method: str
    pattern: str
    times: int
    status: int | None = None  # answered with, instead of being handled
    after: int | None = None  # bytes of the body, in or out, after which the connection is cut
    loses_answer: bool = False  # handled, and cut before it is answered
    action: Callable[[], None] | None = None  # done first


class Refusal(Exception):
    """An answer that is an error; what else its body holds is `told`."""

    def __init__(self, status: int, message: str, *, code: str = "", commit: str = "", **told: Any) -> None:
        super().__init__(message)
        self.status, self.told = status, {"error": message, **told}
        headers = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}
        self.headers = {name: value for name, value in headers.items() if value}


class Answer(NamedTuple):
    """An answer that is no JSON."""

    headers: dict[str, str]
    data: bytes = b""
    status: int = 200


class Cut(Exception):
    """The connection ends here."""


class HubServer:
    """A Hub with one user, `me`; to be used as a context manager.

    Attributes:
        url: the endpoint, for `HF_ENDPOINT`.
        token: that of `me`; anybody else reads what is public.
        requests: all that was asked, in the order of arrival.
        problems: what no answer was found for, or failed here; empty unless the client asks for something new.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.problems: list[str] = []
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # by SHA-256
        self._faults: list[Fault] = []
        self.token = "hf_" + "3" * 34

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self._storage = f"http://127.0.0.1:{port}", f"http://localhost:{port}/objects"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, home: str | Path) -> dict[str, str]:
        """Environment variables that send a process of `me` here; `home` is `HF_HOME`, where the cache will be."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": self.token,
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision of a repository holds."""
        files = self.repositories[repo_id].commits[self.commit(repo_id, revision)].files
        return {path: file.data for path, file in files.items()}

    def commit(self, repo_id: str, revision: str = "main") -> str:
        """The id of a revision's commit."""
        return self.repositories[repo_id].find(revision)

    def asked(self, method: str, pattern: str) -> list[Request]:
        """The requests so far whose path a pattern is found in."""
        return [each for each in self.requests if each.method == method and re.search(pattern, each.path)]

    def fail(self, method: str, pattern: str, *, times: int = 1, **fault: Any) -> None:
        """Have the next requests whose path a pattern is found in go wrong; see `Fault`."""
        self._faults.append(Fault(method, pattern, times, **fault))

    def recover(self) -> None:
        """No request goes wrong from now on."""
        self._faults.clear()

    def fault(self, request: Request) -> Fault:
        """The fault of a request, which is one time less from now on; one without any effect if it has none."""
        for fault in self._faults:
            if fault.times and fault.method == request.method and re.search(fault.pattern, request.path):
                fault.times -= 1
                return fault
        return Fault("", "", 0)

    # What requests ask for; `_Handler` finds these by their routes

    def who_am_i(self, request: Request) -> dict[str, Any]:
        self._check_owner(request)
        return {"type": "user", "id": "me", "name": "me", "auth": {"type": "access_token"}}

    def validate_yaml(self, request: Request) -> dict[str, Any]:
        return {"errors": [], "warnings": []}

    def create_repository(self, request: Request) -> dict[str, Any]:
        self._check_owner(request)
        asked = request.json
        repo_id = f"me/{asked['name']}"
        url = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        if repo_id in self.repositories:
            raise Refusal(409, "You already created this model repo", **url)
        made = Repository(asked.get("private") is True or asked.get("visibility") == "private")
        made.names["main"] = made.add({}, "initial commit")
        self.repositories[repo_id] = made
        return url

    def describe(self, request: Request, repo_id: str, revision: str = "main") -> dict[str, Any]:
        repository = self._repository(request, repo_id)
        oid = repository.find(revision)
        files = [{"rfilename": path} for path in sorted(repository.commits[oid].files)]
        return {"id": repo_id, "private": repository.private, "sha": oid, "tags": [], "siblings": files}

    def create_branch(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self._repository(request, repo_id, to_write=True)
        repository.names.setdefault(revision, repository.find("main"))
        return {}

    def create_tag(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self._repository(request, repo_id, to_write=True)
        repository.names[request.json["tag"]] = repository.find(revision)
        return {}

    def tree(self, request: Request, repo_id: str, revision: str, folder: str = "") -> list[dict[str, Any]]:
        """All files of a folder, its own folders included."""
        repository = self._repository(request, repo_id)
        oid = repository.find(revision)
        told = [
            {"type": "file", "path": path, "oid": file.oid, "size": len(file.data)}
            for path, file in sorted(repository.commits[oid].files.items())
            if path.startswith(folder and f"{folder}/")
        ]
        if folder and not told:
            raise Refusal(404, f"{folder} does not exist on {revision!r}", code="EntryNotFound", commit=oid)
        return told

    def preupload(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self._repository(request, repo_id, to_write=True)
        there = repository.commits[repository.find(revision)].files
        told: list[dict[str, Any]] = []
        for path in (each["path"] for each in request.json["files"]):
            mode = "lfs" if path.endswith(LARGE_NAMES) else "regular"
            oid = there[path].oid if path in there else None
            told.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": told}

    def lfs_batch(self, request: Request, repo_id: str) -> dict[str, Any]:
        self._repository(request, repo_id, to_write=True)
        told = request.json["objects"]
        for each in told:
            if each["oid"] not in self.objects:
                each["actions"] = {"upload": {"href": f"{self._storage}/{each['oid']}"}}
        return {"transfer": "basic", "objects": told}

    def put_object(self, request: Request, oid: str) -> dict[str, Any]:
        self.objects[oid] = request.body
        return {}

    def get_object(self, request: Request, oid: str) -> Answer:
        return Answer({"ETag": f'"{oid}"'}, self.objects[oid])

    def make_commit(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        """All of a commit, or, where anything of it is wrong, nothing."""
        repository = self._repository(request, repo_id, to_write=True)
        files, title = dict(repository.commits[repository.find(revision)].files), ""
        for kind, value in ((line["key"], line["value"]) for line in map(json.loads, request.body.splitlines())):
            if kind == "header":
                title = value["summary"]
            elif kind == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), is_large=False)
            else:
                files[value["path"]] = File(self.objects[value["oid"]], is_large=True)
        oid = repository.add(files, title)
        told = {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo_id}/commit/{oid}"}
        if request.query.get("create_pr") == "1":
            number = 1 + sum(name.startswith("refs/pr/") for name in repository.names)
            revision = f"refs/pr/{number}"
            told["pullRequestUrl"] = f"{self.url}/{repo_id}/discussions/{number}"
        repository.names[revision] = oid
        return told

    def resolve(self, request: Request, repo_id: str, revision: str, path: str) -> Answer:
        repository = self._repository(request, repo_id)
        oid = repository.find(revision)
        file = repository.commits[oid].files.get(path)
        if file is None:
            raise Refusal(404, "Entry not found", code="EntryNotFound", commit=oid)
        headers = {"X-Repo-Commit": oid, "ETag": f'"{file.oid}"'}
        if not file.is_large:
            return Answer(headers, file.data)
        headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(file.data))}
        return Answer(headers | {"Location": f"{self._storage}/{file.oid}"}, status=302)

    def _is_owner(self, request: Request) -> bool:
        """Whether `me` asks; nobody who brings another token is answered."""
        given = request.headers.get("authorization")
        if given not in (None, f"Bearer {self.token}"):
            raise Refusal(401, "Invalid credentials in Authorization header")  # the client knows it by this text
        return given is not None

    def _check_owner(self, request: Request) -> None:
        if not self._is_owner(request):
            raise Refusal(401, "You don't have the rights to do that")

    def _repository(self, request: Request, repo_id: str, *, to_write: bool = False) -> Repository:
        """A repository; private ones are not there for others."""
        is_owner, repository = self._is_owner(request), self.repositories.get(repo_id)
        if repository is None or (repository.private and not is_owner):
            raise Refusal(404 if is_owner else 401, "Repository not found", code="RepoNotFound")
        if to_write:
            self._check_owner(request)
        return repository


_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"  # its slashes are quoted
_OID = r"(?P<oid>[0-9a-f]{64})"
_ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", r"/api/whoami-v2", HubServer.who_am_i),
    ("POST", r"/api/validate-yaml", HubServer.validate_yaml),
    ("POST", r"/api/repos/create", HubServer.create_repository),
    ("GET", rf"/api/models/{_REPO}(?:/revision/{_REVISION})?", HubServer.describe),
    ("POST", rf"/api/models/{_REPO}/branch/{_REVISION}", HubServer.create_branch),
    ("POST", rf"/api/models/{_REPO}/tag/{_REVISION}", HubServer.create_tag),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<folder>.+))?", HubServer.tree),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", HubServer.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", HubServer.make_commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", HubServer.lfs_batch),
    ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", HubServer.resolve),
    ("PUT", rf"/objects/{_OID}", HubServer.put_object),
    ("GET", rf"/objects/{_OID}", HubServer.get_object),
]


class _Handler(BaseHTTPRequestHandler):
    """One connection: reads requests, finds who answers them, writes answers, and lets them go wrong."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True  # else every body waits 40 ms for the headers to be acknowledged

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: `hub.requests` is the log."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, unquote(address.path), query, headers)
        self.hub.requests.append(request)
        fault = self.hub.fault(request)
        try:
            if fault.action is not None:
                fault.action()
            request.body = self._read_body(None if self.command == "GET" else fault.after)
            if "authorization" in request.headers and request.path.startswith("/objects/"):
                raise Refusal(400, "Expected no token: storage is on another host")
            if fault.status is not None:
                raise Refusal(fault.status, "This went wrong on purpose")
            answer = self._answer(request, address.path)
            if fault.loses_answer:
                raise Cut
            self._send(request, answer, cut_after=fault.after)
        except Refusal as refusal:
            self._send(request, Answer(refusal.headers, json.dumps(refusal.told).encode(), refusal.status))
        except (Cut, ConnectionError):
            self.close_connection = True
        except Exception as error:  # a thread's exception would be lost
            self.hub.problems.append(f"{request.method} {request.path}: {error!r}")
            self._send(request, Answer({}, repr(error).encode(), 500))

    do_HEAD = do_POST = do_PUT = do_GET

    def _read_body(self, cut_after: int | None) -> bytes:
        if cut_after is not None:
            self.rfile.read(cut_after)
            raise Cut
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, request: Request, path: str) -> Answer:
        method = "GET" if request.method == "HEAD" else request.method
        for known, pattern, answer in _ROUTES:
            if known == method and (match := re.fullmatch(pattern, path)):
                asked = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                made = answer(self.hub, request, **asked)
                return made if isinstance(made, Answer) else Answer({}, json.dumps(made).encode())
        self.hub.problems.append(f"{request.method} {request.path}: unknown here")
        raise Refusal(404, "Unknown address")

    def _send(self, request: Request, answer: Answer, *, cut_after: int | None = None) -> None:
        headers, data, status = answer
        if asked := re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", "")):
            headers = {**headers, "Content-Range": f"bytes {asked[1]}-{len(data) - 1}/{len(data)}"}
            data, status = data[int(asked[1]) :], 206
        with suppress(ConnectionError):  # nobody waits for it any more
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if request.method != "HEAD":
                self.wfile.write(data[:cut_after])
        self.close_connection = self.close_connection or cut_after is not None
