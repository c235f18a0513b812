"""What a run needs on this machine before it begins: a device that works, libraries that import.

A missing library is refused before the first byte is written: a run that began would keep the disk
space that it reserved.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from traceback import walk_tb

from ckptmap.errors import PlanError, RunError

OWN_PACKAGES = ("ckptmap", "ckptmap_cli")


@cache
def require_device(device: object, label: str) -> None:
    """Raise PlanError CKM210 where no value can go to the device and come back.

    `label` is what the error calls the device: `--device cuda:1`, `device='cuda:1'`.
    """
    if str(device) == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=device).item()  # type: ignore[call-overload]
    except (AssertionError, RuntimeError, TypeError) as error:
        raise PlanError(
            "CKM210",
            f"{label}: cannot be used here: {str(error).partition(chr(10))[0]}",
            "list the devices of this machine with: ckptmap doctor",
        ) from error


def require_libraries(*names: str) -> None:
    """Raise PlanError CKM211 where a library is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise not_installed(name)


def not_installed(name: str) -> PlanError:
    return PlanError(
        "CKM211", f"this needs {name}, which is not installed here", f"pip install {name}"
    )


def import_failure(error: BaseException) -> RunError | None:
    """Return RunError CKM211 where an installed library failed to import; None for other errors.

    The traceback tells which library: the frame after the last one of ours. A shared library that
    the system's loader cannot find gives an ImportError; loaded through ctypes, an OSError.
    """
    modules = [str(f.f_globals.get("__name__", "")) for f, _ in walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in modules]
    by_ctypes = isinstance(error, OSError) and packages[-1:] == ["ctypes"]
    last_own = max((at for at, name in enumerate(packages) if name in OWN_PACKAGES), default=-1)
    foreign = packages[last_own + 1 :]
    if not foreign or not (by_ctypes or isinstance(error, ImportError)):
        return None
    what = (str(error).strip() or type(error).__name__).splitlines()[0]
    return RunError(
        "CKM211",
        f"{foreign[0]} is installed here and cannot be imported: {what}",
        f"install it again: pip install --force-reinstall {foreign[0]}",
    )
