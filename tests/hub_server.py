# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Hub on loopback: model repositories, commits, revisions, large files, tokens, and faults on demand.

It answers what `huggingface_hub` asks over HTTP, in the standard library alone and in memory, so that everything that
is pushed and loaded goes through the real client. Large files are Git LFS objects on another host name
(`localhost` beside `127.0.0.1`), which refuses any request that brings a token, as signed addresses do. There is no
Xet: clients that have `hf_xet` installed need `HF_HUB_DISABLE_XET=1` to upload.

    with HubServer() as hub:
        subprocess.run([sys.executable, "push.py"], env={**os.environ, **hub.environment("folder/for/the/cache")})
        print(hub.files("me/catalogue"))

`python tests/hub_server.py` serves one for other terminals, until it is interrupted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 10 * 2**20  # from here on the Hub keeps any file as an LFS object
LARGE_NAMES = (".bin", ".gguf", ".safetensors")  # and these in any case, as its .gitattributes say
MESSAGE_OF_UNKNOWN_TOKEN = "Invalid credentials in Authorization header"  # the client knows it by this text


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


@dataclass(frozen=True)
class Commit:
    """All files at one moment, by path."""

    files: dict[str, File]
    title: str
    parent: str | None


@dataclass
class Repository:
    """Commits by id, and the names of some of them."""

    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> str | None:
        """The commit that a branch, tag, pull request or the beginning of an id means."""
        for names in (self.branches, self.tags, self.pull_requests):
            if revision in names:
                return names[revision]
        is_id = re.fullmatch("[0-9a-f]{7,40}", revision)
        return next((oid for oid in self.commits if is_id and oid.startswith(revision)), None)

    def add(self, files: dict[str, File], *, title: str, parent: str | None) -> str:
        """Keep a commit that no name points to yet."""
        told = [title, parent, len(self.commits), sorted((path, file.oid) for path, file in files.items())]
        oid = hashlib.sha1(json.dumps(told).encode()).hexdigest()
        self.commits[oid] = Commit(files, title, parent)
        return oid


@dataclass
class Request:
    """What was asked, and how it was answered (0: not at all)."""

    method: str
    path: str  # unquoted, without the query
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: bytes = b""
    status: int = 0
    sent: int = 0  # bytes of the answer's body


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
    """An answer that is an error."""

    def __init__(self, status: int, code: str | None, message: str, *, commit: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message}
        self.headers |= {} if code is None else {"X-Error-Code": code}
        self.headers |= {} if commit is None else {"X-Repo-Commit": commit}


class Cut(Exception):
    """The connection ends here."""


class HubServer:
    """A Hub with one user, `me`, until `add_user` adds others; to be used as a context manager.

    Attributes:
        url: the endpoint, for `HF_ENDPOINT`.
        token: that of `me`.
        requests: all that was asked, in the order of arrival.
        problems: what no answer was found for, or failed here; empty unless the client asks for something new.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.problems: list[str] = []
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # by SHA-256
        self._users: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._lock = RLock()
        self._key = secrets.token_hex(8)  # signs addresses of large files
        self.token = self.add_user("me")

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.storage_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}/objects"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add_user(self, name: str) -> str:
        """Another user; returns the token."""
        token = f"hf_{secrets.token_hex(17)}"
        self._users[token] = name
        return token

    def environment(self, home: str | Path, *, token: str | None = None) -> dict[str, str]:
        """Environment variables that send a process of a user of this Hub here.

        Args:
            home: `HF_HOME`, where the cache will be.
            token: another user's, or `""` for nobody's; by default `me`'s.
        """
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": self.token if token is None else token,
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision of a repository holds, without what the Hub itself put there."""
        files = self.repositories[repo_id].commits[self.commit(repo_id, revision)].files
        return {path: file.data for path, file in files.items() if path != ".gitattributes"}

    def commit(self, repo_id: str, revision: str = "main") -> str:
        """The id of a revision's commit."""
        oid = self.repositories[repo_id].find(revision)
        if oid is None:
            raise KeyError(f"{repo_id} has no revision {revision}")
        return oid

    def asked(self, method: str, pattern: str) -> list[Request]:
        """The requests so far whose path a pattern is found in."""
        return [each for each in self.requests if each.method == method and re.search(pattern, each.path)]

    def fail(self, method: str, pattern: str, *, times: int = 1, **fault: Any) -> None:
        """Have the next requests whose path a pattern is found in go wrong; see `Fault`."""
        with self._lock:
            self._faults.append(Fault(method, pattern, times, **fault))

    def recover(self) -> None:
        """No request goes wrong from now on."""
        with self._lock:
            self._faults.clear()

    def signed(self, oid: str) -> str:
        """The address of a large file, good for whoever has it."""
        return f"{self.storage_url}/{oid}?signature={self._key}"

    def fault(self, request: Request) -> Fault | None:
        """The fault of a request, which is one time less from now on."""
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.method == request.method and re.search(fault.pattern, request.path):
                    fault.times -= 1
                    return fault
        return None

    # What requests ask for; `_Handler` finds these by their routes

    def who_am_i(self, request: Request) -> dict[str, Any]:
        user = self._user(request)
        if user is None:
            raise Refusal(401, None, "Invalid username or password.")
        return {"type": "user", "id": user, "name": user, "auth": {"type": "access_token"}}

    def validate_yaml(self, request: Request) -> dict[str, Any]:
        has_metadata = json.loads(request.body)["content"].startswith("---\n")
        return {"errors": [], "warnings": [] if has_metadata else [{"message": "empty or missing yaml metadata"}]}

    def create_repository(self, request: Request) -> dict[str, Any]:
        asked = json.loads(request.body)
        user = self._user(request)
        if user is None:
            raise Refusal(401, None, "Invalid username or password.")
        owner = asked.get("organization") or user
        if owner != user:
            raise Refusal(403, None, f"You don't have the rights to create a model under the namespace {owner}")
        repo_id = f"{owner}/{asked['name']}"
        url = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        with self._lock:
            if repo_id in self.repositories:
                raise _Conflict("You already created this model repo", url)
            private = asked.get("private") is True or asked.get("visibility") == "private"
            made = self.repositories[repo_id] = Repository(private)
            first = {".gitattributes": File(b"*.safetensors filter=lfs\n", is_large=False)}
            made.branches["main"] = made.add(first, title="initial commit", parent=None)
        return url

    def describe(self, request: Request, repo_id: str, revision: str = "main") -> dict[str, Any]:
        repository, oid = self._read(request, repo_id, revision)
        files = repository.commits[oid].files
        return {
            "_id": oid[:24],
            "id": repo_id,
            "author": repo_id.split("/")[0],
            "private": repository.private,
            "sha": oid,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }

    def refs(self, request: Request, repo_id: str) -> dict[str, Any]:
        repository = self._repository(request, repo_id)
        kinds = {"branches": repository.branches, "tags": repository.tags, "pullRequests": repository.pull_requests}
        prefixes = {"branches": "refs/heads/", "tags": "refs/tags/", "pullRequests": ""}
        told = {
            kind: [{"name": name, "ref": prefixes[kind] + name, "targetCommit": oid} for name, oid in names.items()]
            for kind, names in kinds.items()
        }
        return {**told, "converts": []}

    def create_branch(self, request: Request, repo_id: str, branch: str) -> dict[str, Any]:
        repository = self._repository(request, repo_id, to_write=True)
        if branch.startswith("refs/"):
            raise Refusal(400, None, f"Invalid reference for a branch: {branch}")
        start = json.loads(request.body or b"{}").get("startingPoint") or "main"
        with self._lock:
            if branch in repository.branches:
                raise Refusal(409, None, f"Reference already exists: refs/heads/{branch}")
            repository.branches[branch] = self._find(repository, start)
        return {}

    def create_tag(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self._repository(request, repo_id, to_write=True)
        tag = json.loads(request.body)["tag"]
        with self._lock:
            if tag in repository.tags:
                raise Refusal(409, None, f"Reference already exists: refs/tags/{tag}")
            repository.tags[tag] = self._find(repository, revision)
        return {}

    def tree(self, request: Request, repo_id: str, revision: str, folder: str = "") -> list[dict[str, Any]]:
        repository, oid = self._read(request, repo_id, revision)
        told: dict[str, dict[str, Any]] = {}
        for path, file in sorted(repository.commits[oid].files.items()):
            if not path.startswith(folder and f"{folder}/"):
                continue
            parts = path[len(folder and f"{folder}/") :].split("/")
            if len(parts) > 1 and request.query.get("recursive", "false").lower() not in ("true", "1"):
                name = "/".join(filter(None, (folder, parts[0])))
                told[name] = {"type": "directory", "path": name, "oid": oid, "size": 0}
                continue
            large = {"lfs": {"oid": file.oid, "size": len(file.data), "pointerSize": 134}} if file.is_large else {}
            told[path] = {"type": "file", "path": path, "oid": file.oid, "size": len(file.data), **large}
        if folder and not told:
            raise Refusal(404, "EntryNotFound", f"{folder} does not exist on {revision!r}", commit=oid)
        return list(told.values())

    def preupload(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        repository = self._repository(request, repo_id, to_write="create_pr" not in request.query)
        there = repository.commits[self._find(repository, revision)].files
        told = []
        for file in json.loads(request.body)["files"]:
            is_large = file["size"] >= LARGE or file["path"].endswith(LARGE_NAMES)
            mode = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            told.append({**mode, "oid": there[file["path"]].oid if file["path"] in there else None})
        return {"files": told}

    def lfs_batch(self, request: Request, repo_id: str) -> dict[str, Any]:
        self._repository(request, repo_id, to_write=True)
        told = []
        for each in json.loads(request.body)["objects"]:
            actions = {
                "upload": {"href": self.signed(each["oid"])},
                "verify": {"href": f"{self.url}/{repo_id}.git/info/lfs/verify"},
            }
            told.append({**each, **({} if each["oid"] in self.objects else {"actions": actions})})
        return {"transfer": "basic", "objects": told}

    def lfs_verify(self, request: Request, repo_id: str) -> dict[str, Any]:
        self._repository(request, repo_id, to_write=True)
        asked = json.loads(request.body)
        if len(self.objects.get(asked["oid"], b"")) != asked["size"]:
            raise Refusal(404, None, f"There is no object {asked['oid']} of {asked['size']} bytes")
        return {}

    def put_object(self, request: Request, oid: str) -> dict[str, Any]:
        self._check_signature(request)
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise Refusal(400, None, "The object's SHA-256 is another one")
        self.objects[oid] = request.body
        return {}

    def make_commit(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        """All of a commit, or, where anything of it is wrong, nothing."""
        proposes = request.query.get("create_pr") == "1"
        repository = self._repository(request, repo_id, to_write=not proposes)
        lines = [json.loads(line) for line in request.body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        with self._lock:
            parent = self._find(repository, revision)
            if header.get("parentCommit") not in (None, parent):
                raise Refusal(412, None, "A commit has happened since. Please refresh and try again.")
            if not proposes and not {revision} & (repository.branches.keys() | repository.pull_requests.keys()):
                raise Refusal(400, None, f"{revision} is no branch")
            files = dict(repository.commits[parent].files)
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = File(base64.b64decode(value["content"]), is_large=False)
                elif line["key"] == "lfsFile":
                    if value["oid"] not in self.objects:
                        raise Refusal(400, None, f"There is no object {value['oid']} for {value['path']}")
                    files[value["path"]] = File(self.objects[value["oid"]], is_large=True)
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
                elif line["key"] != "header":
                    raise Refusal(400, None, f"Unknown operation {line['key']}")
            oid = repository.add(files, title=header["summary"], parent=parent)
            told = {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo_id}/commit/{oid}"}
            if proposes:
                number = len(repository.pull_requests) + 1
                repository.pull_requests[f"refs/pr/{number}"] = oid
                return {**told, "pullRequestUrl": f"{self.url}/{repo_id}/discussions/{number}"}
            names = repository.branches if revision in repository.branches else repository.pull_requests
            names[revision] = oid
            return told

    def resolve(self, request: Request, repo_id: str, revision: str, path: str) -> _Contents | _Redirect:
        repository, oid = self._read(request, repo_id, revision)
        file = repository.commits[oid].files.get(path)
        if file is None:
            raise Refusal(404, "EntryNotFound", "Entry not found", commit=oid)
        headers = {"X-Repo-Commit": oid, "ETag": f'"{file.oid}"'}
        if not file.is_large:
            return _Contents(file.data, headers)
        large = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(file.data))}
        return _Redirect(self.signed(file.oid), headers | large)

    def get_object(self, request: Request, oid: str) -> _Contents:
        self._check_signature(request)
        if oid not in self.objects:
            raise Refusal(404, None, f"There is no object {oid}")
        return _Contents(self.objects[oid], {"ETag": f'"{oid}"'})

    def _user(self, request: Request) -> str | None:
        given = request.headers.get("authorization")
        if given is None:
            return None
        token = given.removeprefix("Bearer ")
        if token not in self._users:
            raise Refusal(401, None, MESSAGE_OF_UNKNOWN_TOKEN)
        return self._users[token]

    def _repository(self, request: Request, repo_id: str, *, to_write: bool = False) -> Repository:
        """A repository that the user may see, or change; private ones are not there for others."""
        user, owner = self._user(request), repo_id.split("/")[0]
        repository = self.repositories.get(repo_id)
        if repository is None or (repository.private and user != owner):
            raise Refusal(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if to_write and user is None:
            raise Refusal(401, None, "Invalid username or password.")
        if to_write and user != owner:
            raise Refusal(403, None, f"You don't have write access to {repo_id}")
        return repository

    def _read(self, request: Request, repo_id: str, revision: str) -> tuple[Repository, str]:
        repository = self._repository(request, repo_id)
        return repository, self._find(repository, revision)

    def _find(self, repository: Repository, revision: str) -> str:
        oid = repository.find(revision)
        if oid is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid

    def _check_signature(self, request: Request) -> None:
        if "authorization" in request.headers:
            raise Refusal(400, None, "Only one way to authorise a request is allowed: it is signed, and has a token")
        if request.query.get("signature") != self._key:
            raise Refusal(403, None, "The signature is wrong")


class _Conflict(Refusal):
    """What is asked for is there already; its address is told."""

    def __init__(self, message: str, there: dict[str, Any]) -> None:
        super().__init__(409, None, message)
        self.there = there


@dataclass(frozen=True)
class _Contents:
    data: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class _Redirect:
    location: str
    headers: dict[str, str]


_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"  # its slashes are quoted
_ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", r"/api/whoami-v2", HubServer.who_am_i),
    ("POST", r"/api/validate-yaml", HubServer.validate_yaml),
    ("POST", r"/api/repos/create", HubServer.create_repository),
    ("GET", rf"/api/models/{_REPO}", HubServer.describe),
    ("GET", rf"/api/models/{_REPO}/revision/{_REVISION}", HubServer.describe),
    ("GET", rf"/api/models/{_REPO}/refs", HubServer.refs),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<branch>[^/]+)", HubServer.create_branch),
    ("POST", rf"/api/models/{_REPO}/tag/{_REVISION}", HubServer.create_tag),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<folder>.+))?", HubServer.tree),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", HubServer.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", HubServer.make_commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", HubServer.lfs_batch),
    ("POST", rf"/{_REPO}\.git/info/lfs/verify", HubServer.lfs_verify),
    ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", HubServer.resolve),
    ("PUT", r"/objects/(?P<oid>[0-9a-f]{64})", HubServer.put_object),
    ("GET", r"/objects/(?P<oid>[0-9a-f]{64})", HubServer.get_object),
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
            if fault is not None and fault.action is not None:
                fault.action()
            request.body = self._read_body(fault.after if fault is not None and self.command != "GET" else None)
            if fault is not None and fault.status is not None:
                raise Refusal(fault.status, None, "This went wrong on purpose")
            answer = self._answer(request, address.path)
            if fault is not None and fault.loses_answer:
                raise Cut
            self._write(request, answer, cut_after=None if fault is None else fault.after)
        except Refusal as refusal:
            there = refusal.there if isinstance(refusal, _Conflict) else {}
            body = json.dumps({"error": refusal.message, **there}).encode()
            self._send(request, refusal.status, refusal.headers | {"Content-Type": "application/json"}, body)
        except (Cut, ConnectionError):
            self.close_connection = True
        except Exception as error:  # a thread's exception would be lost
            self.hub.problems.append(f"{request.method} {request.path}: {error!r}")
            self._send(request, 500, {}, repr(error).encode())

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

    def _answer(self, request: Request, path: str) -> Any:
        method = "GET" if request.method == "HEAD" else request.method
        for known, pattern, answer in _ROUTES:
            if known == method and (match := re.fullmatch(pattern, path)):
                asked = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                return answer(self.hub, request, **asked)
        self.hub.problems.append(f"{request.method} {request.path}: unknown here")
        raise Refusal(404, None, "Unknown address")

    def _write(self, request: Request, answer: Any, *, cut_after: int | None) -> None:
        if isinstance(answer, _Redirect):
            self._send(request, 302, answer.headers | {"Location": answer.location})
        elif isinstance(answer, _Contents):
            data, headers, status = answer.data, answer.headers | {"Accept-Ranges": "bytes"}, 200
            if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
                start, stop = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1) + 1
                if start >= len(data):
                    raise Refusal(416, None, f"There are {len(data)} bytes")
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
                data, status = data[start:stop], 206
            self._send(request, status, headers, data, cut_after=cut_after)
        else:
            self._send(request, 200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _send(
        self,
        request: Request,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        cut_after: int | None = None,
    ) -> None:
        request.status = status
        with suppress(ConnectionError):  # nobody waits for it any more
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if request.method == "HEAD":
                return
            sent = body if cut_after is None else body[:cut_after]
            self.wfile.write(sent)
            request.sent = len(sent)
        if cut_after is not None:
            self.close_connection = True


def main() -> None:
    """Serve until interrupted, and say how to use it from another terminal."""
    with HubServer() as hub, tempfile.TemporaryDirectory() as home:
        print("\n".join(f"export {name}={value}" for name, value in hub.environment(home).items()), flush=True)
        with suppress(KeyboardInterrupt):
            Event().wait()


if __name__ == "__main__":
    main()
