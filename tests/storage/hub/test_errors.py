"""Faults of the Hub and of its URIs: one line each, with the next command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ckptmap_cli.main import main

import ckptmap
from ckptmap.errors import CkptmapError, RunError, SourceError
from ckptmap.storage.hub.uri import MIRROR_PREFIX
from tests.support.hub.client import wide
from tests.support.hub.server import Fault, Hub
from tests.support.hub.state import MAIN, Blob


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 2 MiB."""
    return wide(tmp_path_factory.mktemp("hub") / "wide")


# ------------------------------------------------------------------ what can be wrong

NOT_THE_HUB = {"a login page": b"<html>log in</html>", "other JSON": b'{"error": "told to fail"}'}

SAID = {
    "disabled": (
        "GET /api/models",
        403,
        {"X-Error-Message": "Access to this resource is disabled."},
    ),
    "no entry": ("/resolve/", 404, {"X-Error-Code": "EntryNotFound"}),
}
"""What the Hub says in headers: of which requests, with which status."""


def failing(hub: Hub, large: Path, wrong: str) -> str:
    """The name to open, once the Hub is such that this goes wrong."""
    hub.add("org/m", large, gated=wrong == "gated", private=wrong == "private")
    if wrong == "pointer":
        pointer = Blob((large / "config.json").read_bytes(), True).pointer
        hub.add("org/m").commit(MAIN, {"model.safetensors": Blob(pointer, lfs=False)})
    if wrong.isdigit():
        said = {"Retry-After": "17"} if wrong == "429" else {}
        hub.faults.append(Fault("GET /api/models", status=int(wrong), headers=said, times=99))
    if wrong in NOT_THE_HUB:  # a login page of the network, or another server
        body = NOT_THE_HUB[wrong]
        hub.faults.append(Fault("GET /api/models", status=200, body=body, times=99))
    if wrong in SAID:
        what, status, headers = SAID[wrong]
        hub.faults.append(Fault(what, status=status, headers=headers, times=99))
    return {
        "missing": "hf://org/nothing", "revision": "hf://org/m@v9", "folder": "hf://org/m/sub",
        "no revision": "hf://org/m@..",
    }.get(wrong, "hf://org/m")  # fmt: skip


WRONG = {
    "missing": ("CKM702", "is not there, or is private and there is no token", "hf auth login"),
    "private": ("CKM702", "is not there, or is private and there is no token", "hf auth login"),
    "gated": ("CKM703", "access is gated and this token has none", "ask for it at "),
    "revision": ("CKM704", "has no revision 'v9', found main", "hf://org/m@main"),
    "folder": ("CKM705", "has no 'sub' at commit", "ckptmap inspect hf://org/m@"),
    "pointer": ("CKM102", "a Git-LFS pointer of", "the repository itself holds the pointer"),
    "401": ("CKM702", "is not there, or is private", "hf auth login"),
    "403": ("CKM707", "this token may not do that", "hf auth login"),
    "429": ("CKM708", "the Hub answers 429", "wait 17 seconds, then run"),
    "500": ("CKM708", "the Hub answers 500", "run the same command again"),
    "a login page": ("CKM708", "what answers is not the Hub", "check HF_ENDPOINT, proxies, and"),
    "other JSON": ("CKM708", "what answers is not the Hub: KeyError", "check HF_ENDPOINT"),
    "disabled": ("CKM703", "the Hub has disabled it", "see http"),
    "no entry": ("CKM705", "has no such file", "/org/m/tree"),
    "no revision": ("CKM701", "the revision is '..', expected a branch", "write hf://org/name"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_one_line_with_the_next_command(
    hub: Hub, large: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    name = failing(hub, large, wrong)
    code, said, hint = WRONG[wrong]
    assert main(["inspect", name]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-2].startswith(f"error[{code}]: hf://org/") and said in lines[-2]
    assert lines[-1].startswith("  hint: ") and hint in lines[-1]


def test_a_private_repository_with_a_token(
    hub: Hub, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/m", large, private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(SourceError, match="is private and this token may not see it"):
        ckptmap.open("hf://org/m")
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    assert len(ckptmap.open("hf://org/m")) == 4
    assert {seen.token for seen in hub.asked("GET /cdn/")} == {""}, "the CDN gets no token"


def test_a_token_that_is_none(hub: Hub, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/m", large)
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(SourceError, match="the Hub does not take this token") as caught:
        ckptmap.open("hf://org/m")
    assert caught.value.code == "CKM707" and caught.value.hint == "log in again: hf auth login"


def test_offline(hub: Hub, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.add("org/m", large)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set") as caught:
        ckptmap.open("hf://org/m")
    assert caught.value.code == "CKM706" and "unset HF_HUB_OFFLINE" in caught.value.hint
    assert not hub.seen


def test_offline_with_a_copy_in_the_cache(
    hub: Hub, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    hub.add("org/m", large)
    held = snapshot_download("org/m")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set") as caught:
        ckptmap.open("hf://org/m")
    assert caught.value.hint.endswith(f"what the cache has of it: {held}")
    assert len(ckptmap.open(held)) == 4


def test_a_file_in_xet_storage_comes_over_http_where_xet_is_off(
    hub: Hub, large: Path, tmp_path: Path
) -> None:
    hub.add("org/m", large)
    hub.xet = True
    ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full")
    assert ckptmap.verify(tmp_path / "out.pt", against=large).ok


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match="the Hub does not answer") as caught:
        ckptmap.open("hf://org/m")
    assert caught.value.code == "CKM706"


def test_the_network_goes_away_while_converting(hub: Hub, large: Path, tmp_path: Path) -> None:
    hub.add("org/m", large)
    plan = ckptmap.plan("hf://org/m", "full")
    hub.faults.append(Fault(r"(GET|HEAD) /", drop_after=0, times=999))
    with pytest.raises(RunError, match="the Hub does not answer while fetching") as caught:
        plan.execute(tmp_path / "out.pt")
    assert (caught.value.code, caught.value.exit_code) == ("CKM706", 3)
    hub.faults.clear()
    plan.execute(tmp_path / "out.pt")
    assert ckptmap.verify(tmp_path / "out.pt", against=large).ok


def test_names_in_a_tree_stay_inside(hub: Hub, large: Path, tmp_path: Path) -> None:
    repo = hub.add("org/m", large)
    repo.commit(MAIN, {**repo.tree(), "../../evil.safetensors": Blob(b"x", False)})
    with pytest.raises(SourceError, match="expected a path inside the repository") as caught:
        ckptmap.open("hf://org/m")
    assert caught.value.code == "CKM716"


@pytest.mark.parametrize(
    "path",
    [
        ".git/hooks/post-checkout", "a/.GIT/config", "git~1/hooks/x", ".git. /config", "/etc/x", "..",
        "a/../../x", "a//b", "./x", "C:x", "a\\b", "a\0b", "",
    ],
)  # fmt: skip
def test_no_file_is_fetched_where_a_name_is_none(hub: Hub, path: str, tmp_path: Path) -> None:
    hub.add("org/m")
    good = {"type": "file", "path": "model.safetensors", "size": 8, "oid": "0" * 40}
    body = json.dumps([good, {**good, "path": path}]).encode()
    for use in (ckptmap.open, lambda name: ckptmap.pull(name, tmp_path / "out")):
        hub.faults.append(Fault("GET .*/tree/", status=200, body=body))
        with pytest.raises(SourceError, match="expected a path inside the repository") as caught:
            use("hf://org/m")
        assert caught.value.code == "CKM716"
    assert not hub.asked("/resolve/") and not (tmp_path / "out").exists()


def test_a_tree_of_nonsense_is_refused(hub: Hub, large: Path) -> None:
    hub.add("org/m", large)
    entry = {"type": "file", "path": "model.safetensors", "size": 8, "oid": "../../x"}
    hub.faults.append(Fault("GET .*/tree/", status=200, body=json.dumps([entry]).encode()))
    with pytest.raises(SourceError, match=r"expected a size and a SHA") as caught:
        ckptmap.open("hf://org/m")
    assert caught.value.code == "CKM716"
    entry |= {"oid": "0" * 40, "path": "x" * 300}
    hub.faults.append(Fault("GET .*/tree/", status=200, body=json.dumps([entry]).encode()))
    with pytest.raises(SourceError, match=r"cannot be given a file on this machine: File name too"):
        ckptmap.open("hf://org/m")


def test_errors_name_files_as_the_user_does(hub: Hub, large: Path) -> None:
    repo = hub.add("org/m", large)
    tree = dict(repo.tree())
    name = sorted(path for path in tree if path.endswith(".safetensors"))[0]
    tree[name] = Blob(b"\xff" * 4096, lfs=True)
    repo.commit(MAIN, tree)
    with pytest.raises(CkptmapError, match=rf"^hf://org/m@\w+/{name}: ") as caught:
        ckptmap.open("hf://org/m")
    assert MIRROR_PREFIX not in str(caught.value), "the mirror's directory"
