"""Turn errors of huggingface_hub into errors of one line, with the next command as the hint.

The Hub answers 401 or 404 both for a repository that is missing and for one that the user may not
see. So the text of the error depends on whether a token was sent.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptmap.core.formatting import first_line
from ckptmap.errors import CkptmapError, SourceError

NOT_THE_HUB = "check HF_ENDPOINT, proxies, and whether this network wants a login; then run the same command again"
Kind = type[CkptmapError]
"""The class to raise: SourceError or DestinationError before any work, RunError during the work."""


@contextmanager
def hub_errors(repo: str, kind: Kind = SourceError, doing: str = "") -> Iterator[None]:
    """Turn any error of huggingface_hub in the block into a `kind` of error about `repo`.

    `doing` is the step for the text of the error: "listing its files". Other errors pass unchanged.
    """
    try:
        yield
    except CkptmapError:
        raise
    except Exception as error:
        said = _said(error, f"hf://{repo}", kind, doing)
        if said is None:
            raise
        if "xet" in str(error).lower():  # the URL of its token or of its store
            said.hint += "; to go without xet: HF_HUB_DISABLE_XET=1"
        raise said from error


def _said(error: BaseException, where: str, kind: Kind, doing: str) -> CkptmapError | None:
    """Return the error to raise; None if it is no failure of the network or the Hub."""
    from huggingface_hub import errors as hub

    seen = _innermost(error)
    if isinstance(seen, hub.OfflineModeIsEnabled):
        return kind(
            "CKM706",
            f"{where}: the Hub may not be asked: HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE, or give the path of a local copy",
        )
    if isinstance(seen, hub.GatedRepoError):
        return kind(
            "CKM703",
            f"{where}: access is gated and this token has none",
            f"ask for it at {_page(where)}, then: hf auth login",
        )
    if isinstance(seen, hub.DisabledRepoError):
        return kind("CKM703", f"{where}: the Hub has disabled it", f"see {_page(where)}")
    if isinstance(seen, hub.RevisionNotFoundError):
        return kind(
            "CKM704", f"{where}: has no such revision", f"see its branches at {_page(where)}/tree"
        )
    if isinstance(seen, hub.EntryNotFoundError) and isinstance(seen, hub.HfHubHTTPError):
        return kind("CKM705", f"{where}: has no such file", f"see {_page(where)}/tree")
    if isinstance(seen, hub.RepositoryNotFoundError):
        return _not_found(where, kind)
    if isinstance(seen, hub.HfHubHTTPError) or _status(seen):
        return _answered(seen, where, kind, doing)
    if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
        return kind(
            "CKM710",
            f"{where}: no space left to keep what is downloaded ({seen.filename or 'the cache'})",
            "free some, set HF_HOME to a larger disk, or convert with --low-disk",
        )
    if _is_network(seen):
        return kind(
            "CKM706",
            f"{where}: the Hub does not answer{_while(doing)}: {first_line(seen)}",
            "check the network (HF_ENDPOINT, proxies), then run the same command again",
        )
    if isinstance(seen, hub.HFValidationError):
        return kind(
            "CKM701",
            f"{where}: is not a name that the Hub takes: {first_line(seen)}",
            "write hf://org/name",
        )
    # huggingface_hub checks no answer.
    if isinstance(seen, json.JSONDecodeError | KeyError):
        what = f"what answers is not the Hub{_while(doing)}: {type(seen).__name__}"
        return kind("CKM708", f"{where}: {what}: {first_line(seen)}", NOT_THE_HUB)
    if doing and isinstance(seen, OSError | ValueError | RuntimeError):
        # huggingface_hub and hf_xet raise these if an answer breaks the protocol.
        return kind(
            "CKM708", f"{where}: {doing} failed: {first_line(seen)}", "run the same command again"
        )
    return None


def _innermost(error: BaseException) -> BaseException:
    """Return the failure behind those that huggingface_hub wraps around it.

    It wraps the failure of a lookup that fell back to the cache (before 1.0 in an HfHubHTTPError),
    and that of an upload in a thread.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    while isinstance(error, LocalEntryNotFoundError) or not isinstance(
        error, HfHubHTTPError | OfflineModeIsEnabled
    ):
        inner = error.__cause__ or error.__context__
        known = inner is not None and (isinstance(inner, OSError) or _is_network(inner))
        if inner is None or not (known or isinstance(inner, RuntimeError)):
            break
        error = inner
    return error


def _is_network(error: BaseException) -> bool:
    """Return whether an error is one of the network.

    Whichever HTTP library huggingface_hub uses (requests, httpx, httpx2), the base class of the
    library's errors is a base class of HfHubHTTPError.
    """
    from huggingface_hub.errors import HfHubHTTPError

    above = [kind for kind in HfHubHTTPError.__mro__ if kind.__module__ != "builtins"]
    return isinstance(error, (above[-1], ConnectionError, TimeoutError))


def _not_found(where: str, kind: Kind) -> CkptmapError:
    if has_token():
        return kind(
            "CKM702",
            f"{where}: is not there, or is private and this token may not see it",
            "check the name, and who you are: hf auth whoami",
        )
    return kind(
        "CKM702",
        f"{where}: is not there, or is private and there is no token",
        "check the name, or log in: hf auth login",
    )


def _answered(error: BaseException, where: str, kind: Kind, doing: str) -> CkptmapError:
    status = _status(error)
    if status == 401 and not has_token():
        return _not_found(where, kind)
    if status == 401:
        return kind(
            "CKM707", f"{where}: the Hub does not take this token", "log in again: hf auth login"
        )
    if status == 403:
        return kind(
            "CKM707",
            f"{where}: this token may not do that{_while(doing)}: {_reason(error)}",
            "log in with a token that may: hf auth login",
        )
    hint = "run the same command again"
    if status == 429:
        response: Any = getattr(error, "response", None)
        after = response.headers.get("Retry-After", "")
        wait = f"{after} seconds" if after.isdigit() else "a few minutes"
        hint = f"the Hub limits how often it is asked: wait {wait}, then {hint}"
    return kind(
        "CKM708", f"{where}: the Hub answers {status}{_while(doing)}: {_reason(error)}", hint
    )


def _status(error: BaseException) -> int:
    """Return the HTTP status of the answer behind an error; 0 if there was none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def has_token() -> bool:
    """Return whether there is a token to send, from HF_TOKEN or a login."""
    from huggingface_hub import get_token

    return get_token() is not None


def _page(where: str) -> str:
    from huggingface_hub.constants import ENDPOINT

    return f"{ENDPOINT}/{where.removeprefix('hf://')}"


def _while(doing: str) -> str:
    return f" while {doing}" if doing else ""


def _reason(error: BaseException) -> str:
    return getattr(error, "server_message", None) or first_line(error)
