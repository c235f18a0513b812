"""What each endpoint of the tests' Hub answers: see `hub_server` for the list of them."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tests.support.hub.state import MAIN, Blob, Conflict, Discussion, Repo

if TYPE_CHECKING:
    from tests.support.hub.server import Handler

PAGE = 3
"""Entries of a page: small, so that paging is met."""
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".distcp", ".model")
WHEN = "2026-01-01T00:00:00.000Z"


class Refused(Exception):
    """An answer of 4xx with the Hub's error headers."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def answer(document: Any, status: int = 200, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(document).encode(), {"Content-Type": "application/json", **headers}


# ----------------------------------------------------------------------------- reading


def whoami(ask: Handler) -> Any:
    if not ask.user:
        raise Refused(401, "", "Invalid username or password.")
    return answer({"name": ask.user, "type": "user", "orgs": []})


def info(ask: Handler, name: str, revision: str) -> Any:
    if name in ask.hub.renamed:
        target = ask.route.replace(name, ask.hub.renamed[name])
        return 307, b"", {"Location": ask.hub.endpoint + target}
    repo = ask._repo(name)
    sha, tree = ask._tree(repo, revision or MAIN)
    return answer(
        {
            "id": repo.id, "sha": sha, "private": repo.private, "gated": repo.gated and "auto",
            "siblings": [{"rfilename": path} for path in tree],
        }
    )  # fmt: skip


def described(path: str, blob: Blob, xet: bool = False) -> dict[str, Any]:
    entry = {"type": "file", "oid": blob.git_sha1, "size": len(blob.content), "path": path}
    if blob.lfs and xet:
        entry["xetHash"] = blob.sha256
    if blob.lfs:
        pointer = len(blob.pointer)
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": pointer}
    return entry


def tree(ask: Handler, name: str, revision: str, path: str) -> Any:
    """Only as it is asked for here: recursive, files alone (folders are left out by the caller)."""
    _, files = ask._tree(ask._repo(name), revision)
    below = path.strip("/") + "/" if path else ""
    found = [
        described(p, blob, ask.hub.xet) for p, blob in sorted(files.items()) if p.startswith(below)
    ]
    if path and not found:
        raise Refused(404, "EntryNotFound", f"{path} does not exist")
    at = int(ask.query.get("cursor", 0))
    more = {}
    if at + PAGE < len(found):
        more["Link"] = (
            f'<{ask.hub.endpoint}{ask.route}?recursive=True&cursor={at + PAGE}>; rel="next"'
        )
    return answer(found[at : at + PAGE], **more)


def paths_info(ask: Handler, name: str, revision: str) -> Any:
    _, files = ask._tree(ask._repo(name), revision)
    wanted = parse_qs(ask.body.decode())["paths"]
    found = [described(path, files[path], ask.hub.xet) for path in wanted if path in files]
    for path in wanted:
        if path not in files and any(file.startswith(path + "/") for file in files):
            found.append({"type": "directory", "oid": "0" * 40, "path": path})
    return answer(found)


def refs(ask: Handler, name: str) -> Any:
    repo = ask._repo(name)
    branches = [
        {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": sha}
        for ref, sha in repo.refs.items()
        if not ref.startswith("refs/pr/")
    ]
    return answer({"branches": branches, "tags": [], "converts": [], "pullRequests": []})


def resolve(ask: Handler, name: str, revision: str, path: str) -> Any:
    repo = ask._repo(name)
    if repo.gated and ask.user != repo.owner:
        raise Refused(403 if ask.user else 401, "GatedRepo", f"Access to {name} is restricted")
    sha, files = ask._tree(repo, revision)
    if path not in files:
        raise Refused(404, "EntryNotFound", f"{path} does not exist")
    blob = files[path]
    headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
    if not blob.lfs:
        return ranged(ask, blob.content, headers)
    headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
    if ask.hub.xet:
        route = f"{ask.hub.endpoint}/api/models/{name}/xet-read-token/{sha}"
        headers |= {"X-Xet-Hash": blob.sha256, "X-Xet-Refresh-Route": route}
    repo.lfs_stored[blob.sha256] = blob.content
    return 302, b"", {**headers, "Location": f"{ask.hub.cdn}/cdn/{name}/{blob.sha256}"}


def cdn(ask: Handler, name: str, oid: str) -> Any:
    return ranged(ask, ask.hub.repos[name].lfs_stored[oid], {"ETag": f'"{oid}"'})


def ranged(ask: Handler, content: bytes, headers: dict[str, str]) -> Any:
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", ask.headers.get("Range") or "")
    if match is None or ask.command == "HEAD":
        return 200, content, {**headers, "Content-Length": str(len(content))} if (
            ask.command == "HEAD"
        ) else headers  # fmt: skip
    first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
    if first >= len(content):
        return 416, b"", headers
    headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    return 206, content[first : last + 1], headers


# ----------------------------------------------------------------------------- writing


def create(ask: Handler) -> Any:
    asked = json.loads(ask.body)
    owner = asked.get("organization") or ask.user
    name = f"{owner}/{asked['name']}"
    if not ask.user:
        raise Refused(401, "", "Invalid username or password.")
    if owner != ask.user:
        raise Refused(403, "", f"You don't have the rights to create a model under {owner}")
    url = f"{ask.hub.endpoint}/{name}"
    if name in ask.hub.repos:
        return answer({"error": "You already created this model repo", "url": url}, 409)
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    ask.hub.repos[name] = Repo(name, owner, private=private)
    return answer({"url": url})


def validate(ask: Handler) -> Any:
    return answer({"errors": [], "warnings": []})


def preupload(ask: Handler, name: str, revision: str) -> Any:
    _, files = ask._tree(ask._repo(name, write=True), revision)
    modes = []
    for file in json.loads(ask.body)["files"]:
        lfs = file["path"].endswith(LFS_SUFFIXES) or file["size"] > 10_000_000
        known = files.get(file["path"])
        mode = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular"}
        modes.append(mode | {"shouldIgnore": False, "oid": known.etag if known else None})
    return answer({"files": modes})


def batch(ask: Handler, name: str) -> Any:
    repo = ask._repo(name, write=True)
    objects = []
    for item in json.loads(ask.body)["objects"]:
        found = dict(item)
        if item["oid"] not in repo.lfs_stored:
            put = {"href": f"{ask.hub.endpoint}/lfs/{name}/{item['oid']}"}
            found["actions"] = {
                "upload": put,
                "verify": {"href": f"{ask.hub.endpoint}/lfs/{name}/verify"},
            }
        objects.append(found)
    return answer({"transfer": "basic", "objects": objects})


def put(ask: Handler, name: str, oid: str) -> Any:
    """An object store that keeps what it is given: what was damaged on the way stays damaged."""
    content = ask.body
    if ask.fault is not None and ask.fault.damage:
        content = bytes([content[0] ^ 1]) + content[1:]
    ask.hub.repos[name].lfs_stored[oid] = content
    return 200, b"", {"ETag": '"part"'}


def verify(ask: Handler, name: str) -> Any:
    asked, repo = json.loads(ask.body), ask.hub.repos[name]
    stored = repo.lfs_stored.get(asked["oid"], b"")
    if Blob(stored, True).sha256 != asked["oid"]:
        repo.lfs_stored.pop(asked["oid"], None)
        raise Refused(400, "", "the object's hash is not its name")
    return answer({})


def commit(ask: Handler, name: str, revision: str) -> Any:
    repo = ask._repo(name, write=True)
    _, files = ask._tree(repo, revision)
    tree, parent = dict(files), None
    for line in ask.body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "header":
            parent = value.get("parentCommit")
        elif item["key"] == "file":
            tree[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
        elif item["key"] == "lfsFile":
            if value["oid"] not in repo.lfs_stored:
                raise Refused(400, "", f"LFS object {value['oid']} is not uploaded")
            tree[value["path"]] = Blob(repo.lfs_stored[value["oid"]], lfs=True)
        elif item["key"] == "deletedFile":
            tree.pop(value["path"], None)  # whether it is there, the parent commit tells
    try:
        made = repo.commit(revision, tree, parent)
    except Conflict as error:
        raise Refused(412, "", str(error)) from error
    url = f"{ask.hub.endpoint}/{name}/commit/{made}"
    return answer({"commitUrl": url, "commitOid": made, "success": True})


def branch(ask: Handler, name: str, ref: str) -> Any:
    repo = ask._repo(name, write=True)
    if ask.command == "DELETE":
        repo.refs.pop(ref, None)
        return answer({})
    if ref in repo.refs:
        raise Refused(409, "", "Reference already exists")
    start = json.loads(ask.body or b"{}").get("startingPoint") or MAIN
    repo.refs[ref], _ = ask._tree(repo, start)
    return answer({})


# ----------------------------------------------------------------------------- pull requests


def shown(repo: Repo, pull: Discussion) -> dict[str, Any]:
    return {
        "num": pull.num, "title": pull.title, "status": pull.status, "createdAt": WHEN,
        "author": {"name": pull.author}, "repo": {"name": repo.id, "type": "model"},
        "isPullRequest": pull.is_pull_request, "events": [], "filesWithConflicts": [],
        "changes": {"base": "refs/heads/main", "mergeCommitId": pull.merge_commit or None},
    }  # fmt: skip


def discussions(ask: Handler, name: str) -> Any:
    repo = ask._repo(name)
    if ask.command == "POST":
        asked = json.loads(ask.body)
        if not ask.user:
            raise Refused(401, "", "Invalid username or password.")
        pull = repo.open_pull(asked["title"], asked["description"], ask.user)
        return answer({"num": pull.num})
    kinds = {"open": ("open", "draft"), "closed": ("closed", "merged")}
    status = kinds.get(ask.query.get("status", ""), ("open", "draft", "closed", "merged"))
    found = [pull for pull in repo.discussions[::-1] if pull.status in status]
    start = int(ask.query.get("p", 0)) * PAGE
    page = [shown(repo, pull) for pull in found[start : start + PAGE]]
    return answer({"count": len(found), "start": start, "discussions": page})


def discussion(ask: Handler, name: str, num: str, action: str) -> Any:
    repo = ask._repo(name)
    pull = next((pull for pull in repo.discussions if pull.num == int(num)), None)
    if pull is None:
        raise Refused(404, "", "no such discussion")
    if not action:
        return answer(shown(repo, pull))
    ask._repo(name, write=True)
    event = {"id": "1", "type": "status-change", "createdAt": WHEN, "author": {"name": ask.user}}
    if action == "merge":
        try:
            repo.merge(pull)
        except Conflict as error:
            raise Refused(409, "", str(error)) from error
    elif action == "status":
        pull.status = json.loads(ask.body)["status"]
    return answer({"newStatus": {**event, "data": {"status": pull.status}}})


NAME = r"([^/]+/[^/]+)"
ROUTES = (
    (r"GET /api/whoami-v2", whoami),
    (rf"GET /api/models/{NAME}(?:/revision/([^/]+))?", info),
    (rf"GET /api/models/{NAME}/tree/([^/]+)(?:/(.+))?", tree),
    (rf"POST /api/models/{NAME}/paths-info/([^/]+)", paths_info),
    (rf"GET /api/models/{NAME}/refs", refs),
    (rf"(?:GET|HEAD) /{NAME}/resolve/([^/]+)/(.+)", resolve),
    (rf"(?:GET|HEAD) /cdn/{NAME}/(\w+)", cdn),
    (r"POST /api/repos/create", create),
    (r"POST /api/validate-yaml", validate),
    (rf"POST /api/models/{NAME}/preupload/([^/]+)", preupload),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", batch),
    (rf"PUT /lfs/{NAME}/(\w+)", put),
    (rf"POST /lfs/{NAME}/verify", verify),
    (rf"POST /api/models/{NAME}/commit/([^/]+)", commit),
    (rf"(?:POST|DELETE) /api/models/{NAME}/branch/([^/]+)", branch),
    (rf"(?:GET|POST) /api/models/{NAME}/discussions", discussions),
    (rf"(?:GET|POST) /api/models/{NAME}/discussions/(\d+)(?:/(\w+))?", discussion),
)  # fmt: skip
"""Method and path -> who answers, in order."""
