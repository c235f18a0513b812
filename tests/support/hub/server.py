"""A small Hugging Face Hub on loopback, for the real huggingface_hub client (`HF_ENDPOINT`).

It stands for these endpoints of the public Hub (https://huggingface.co/docs/hub/api and the calls
of huggingface_hub 2.4), for model repositories alone:

    GET  /api/whoami-v2                              whoami
    GET  /api/models/R[/revision/REV]                model_info; 307 where R was renamed
    GET  /api/models/R/tree/REV[/PATH]               list_repo_tree, in pages of PAGE by `Link`
    POST /api/models/R/paths-info/REV                get_paths_info
    GET  /api/models/R/refs                          list_repo_refs
    HEAD, GET /R/resolve/REV/PATH                    hf_hub_download and ranges: ETag, X-Repo-Commit;
                                                     LFS files redirect to another host ("the CDN")
                                                     with X-Linked-Etag and X-Linked-Size, and with
                                                     X-Xet-Hash where `Hub.xet`
    POST /api/repos/create                           create_repo
    POST /api/validate-yaml                          the card of a commit
    POST /api/models/R/preupload/REV                 LFS or regular, by what the tree says
    POST /R.git/info/lfs/objects/batch               Git LFS batch: upload and verify actions
    PUT  /lfs/R/OID, POST /lfs/R/verify              the object store
    POST /api/models/R/commit/REV                    ndjson: header, file, lfsFile, deletedFile
    POST, DELETE /api/models/R/branch/B              create_branch, delete_branch
    GET, POST /api/models/R/discussions[/N[/status|merge|comment]]   pull requests: draft, open,
                                                     merged; only an open one can be merged

    GET  /api/models/R/xet-{read,write}-token/REV    tokens of xet, 404 unless `Hub.cas`
    GET  /v1/reconstructions/HASH, /v1/chunks/...    the content store of xet (`hub_xet`), for hf_xet
    POST /v1/xorbs/default/HASH, /v1/shards          itself; its /v2 forms are answered with 404

Tests have HF_HUB_DISABLE_XET=1, so that the client takes the HTTP way, except those of `test_xet`
and of a xet store that cannot be reached. What ckptmap adds (size and SHA-256 of every file against
the tree, before and after) is the same on both ways.

`Hub.faults` makes it fail: answers of any status, connections that drop after some bytes, bodies
cut short or damaged, delays. `Hub.seen` lists what was asked for and how many bytes were sent.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.hub.endpoints import LFS_SUFFIXES, ROUTES, Refused
from tests.support.hub.state import MAIN, Blob, Repo
from tests.support.hub.xet import XET_ROUTES

TOKENS = {"hf_owner": "org", "hf_reader": "reader", "cas": "the content store"}
"""Token -> user. `org` may write to what it owns, `reader` reads what is public."""


@dataclass
class Fault:
    """Applied to requests whose `METHOD path` matches, `times` times after `skip` of them."""

    match: str
    status: int = 0
    body: bytes = b'{"error": "told to fail"}'
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None
    """Cut the connection after so many bytes of the body."""
    hold: bool = False
    """Instead of cutting it: send no more, until the client goes."""
    truncate: int | None = None
    """Send so many bytes less, and say that this is all."""
    damage: bool = False
    delay_s: float = 0.0
    times: int = 1
    skip: int = 0


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    range: str
    sent_nbytes: int
    token: str
    host: str


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is part of the test; anything else is a defect of it."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Hub:
    """The server's state; `with Hub() as hub:` runs it at `hub.endpoint`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.renamed: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.xet = False
        self.cas = False
        """Does the content store of xet answer?"""
        self.xorbs: dict[str, list[bytes]] = {}
        """Its chunks, by the xorbs that they came in."""
        self.hooks: list[Callable[[str, bool], None]] = []
        """Called with `METHOD path` before and after (True) a request has had its effect."""
        self.lock = threading.RLock()
        self.server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.cdn = f"http://localhost:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def add(self, repo: str, folder: Path | None = None, **about: Any) -> Repo:
        """A repository with the files of a folder on main."""
        made = self.repos[repo] = Repo(repo, repo.split("/")[0], **about)
        if folder is not None:
            tree = dict(made.tree())
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    lfs = file.name.endswith(LFS_SUFFIXES)
                    tree[str(file.relative_to(folder))] = Blob(file.read_bytes(), lfs)
            made.commit(MAIN, tree)
        return made

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if re.search(fault.match, request) and fault.times:
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def sent(self, pattern: str = "") -> int:
        """Bytes sent for requests whose path matches."""
        return sum(seen.sent_nbytes for seen in self.seen if re.search(pattern, seen.path))

    def asked(self, pattern: str) -> list[Seen]:
        return [seen for seen in self.seen if re.search(pattern, f"{seen.method} {seen.path}")]


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    # Head and body are two writes: the second would wait 40 ms for the client to confirm the first.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # ------------------------------------------------------------------ one request

    def _serve(self) -> None:
        nbytes = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(nbytes)
        if len(self.body) < nbytes:  # the client is gone; no store keeps a part of what it sent
            self.close_connection = True
            return
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self._chunks())
        parts = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.route = parts.path
        self.fault = self.hub.fault(f"{self.command} {unquote(self.route)}")
        if self.fault is not None and self.fault.delay_s:
            time.sleep(self.fault.delay_s)
        try:
            if self.fault is not None and self.fault.status:
                headers = self.fault.headers
                return self._send(self.fault.status, self.fault.body, headers)
            self._hooks(False)
            with self.hub.lock:
                status, content, headers = self._answer()
            self._hooks(True)
        except Refused as refused:
            status, headers = refused.status, {"X-Error-Message": refused.message}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            content = json.dumps({"error": refused.message}).encode()
        self._send(status, content, headers)

    def _hooks(self, done: bool) -> None:
        for hook in self.hub.hooks:
            hook(f"{self.command} {unquote(self.route)}", done)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        fault = self.fault or Fault("")
        if fault.truncate is not None:
            content = content[: len(content) - fault.truncate]
        if fault.damage and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        with contextlib.suppress(OSError):  # a client that was killed
            sent = b"" if self.command == "HEAD" else content
            if fault.drop_after is not None:
                sent = sent[: fault.drop_after]
                self.close_connection = True
            self._log(len(sent))  # first: a client that has its answer may look at once
            self.end_headers()
            self.wfile.write(sent)
            if fault.hold:
                self.connection.recv(1)

    def _log(self, nbytes: int) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        seen = Seen(
            self.command, unquote(self.route), self.headers.get("Range") or "", nbytes, token,
            self.headers.get("Host") or "",
        )  # fmt: skip
        with self.hub.lock:
            self.hub.seen.append(seen)

    # ------------------------------------------------------------------ who asks for what

    @property
    def user(self) -> str:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return TOKENS.get(token, "")

    def _repo(self, name: str, write: bool = False) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.user != repo.owner):
            raise Refused(404 if self.user else 401, "RepoNotFound", "Repository not found")
        if write and self.user != repo.owner:
            raise Refused(403, "", "You don't have the rights to write to this repository")
        return repo

    def _tree(self, repo: Repo, revision: str) -> tuple[str, dict[str, Blob]]:
        sha = repo.resolve(unquote(revision))
        if sha is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repo.commits[sha]

    def _answer(self) -> Any:
        self.user  # noqa: B018 - a wrong token is refused everywhere
        for pattern, handle in (*ROUTES, *XET_ROUTES):
            match = re.fullmatch(pattern, f"{self.command} {self.route}")
            if match is not None:
                return handle(self, *map(unquote, match.groups(default="")))
        raise Refused(404, "", f"no such endpoint: {self.command} {self.route}")
