"""Check, before a run begins, that its device works and that its libraries can be imported.

A missing library is refused before the first byte is written, because a run that has begun keeps
the disk space that it reserved.
"""

from __future__ import annotations

from functools import cache

from ckptmap.core.formatting import first_line
from ckptmap.errors import PlanError, RunError

LIBRARIES = {
    name.replace("-", "_"): name
    for name in (
        "torch", "numpy", "torchao", "safetensors", "huggingface_hub", "typer", "xxhash", "isal",
        "transformers", "accelerate", "bitsandbytes", "peft", "compressed-tensors", "triton",
        "lightning", "pytest", "jinja2",
    )
}  # fmt: skip
"""Module -> distribution, of the libraries that ckptmap imports."""
OWN_PACKAGES = ("ckptmap", "ckptmap_cli")


@cache
def require_device(device: object, label: str) -> None:
    """Raise PlanError CKM210 if no value can be copied to the device and back.

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
            f"{label}: cannot be used here: {first_line(error)}",
            "list the devices of this machine with: ckptmap doctor",
        ) from error


def require_libraries(*names: str) -> None:
    """Raise PlanError CKM211 if one of the libraries is not installed."""
    import importlib.util

    for name in names:
        if importlib.util.find_spec(name) is None:
            raise not_installed(name)


def not_installed(name: str) -> PlanError:
    return PlanError("CKM211", f"this needs {name}, which is not installed here", _install(name))


def _install(name: str, flag: str = "") -> str:
    """Return the command that installs a library; a module of another package has none.

    The name of a module is not that of a distribution: pip would install whatever somebody has put
    under it.
    """
    if name in LIBRARIES:
        return f"pip install {flag}{LIBRARIES[name]}"
    return (
        "ckptmap does not import it: install what does anew; plugins are listed by ckptmap doctor"
    )


def import_failure(error: BaseException) -> RunError | None:
    """Return RunError CKM211 if the error is that an installed library cannot be imported, else
    None.

    The library is that of the frame after the last frame of ckptmap in the traceback. A shared
    library that the system's loader cannot find raises ImportError, or OSError through ctypes.
    """
    from traceback import walk_tb  # here: most runs have no error, and it takes 5 ms

    modules = [str(f.f_globals.get("__name__", "")) for f, _ in walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in modules]
    by_ctypes = isinstance(error, OSError) and packages[-1:] == ["ctypes"]
    last_own = max((at for at, name in enumerate(packages) if name in OWN_PACKAGES), default=-1)
    foreign = packages[last_own + 1 :]
    if not foreign or not (by_ctypes or isinstance(error, ImportError)):
        return None
    hint = _install(foreign[0], "--force-reinstall ")
    return RunError(
        "CKM211",
        f"{foreign[0]} is installed here and cannot be imported: {first_line(error)}",
        f"install it again: {hint}" if foreign[0] in LIBRARIES else hint,
    )
