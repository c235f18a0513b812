"""Read the model's config.json, which supplies the sizes that the shapes of tensors do not determine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from ckptmap.errors import CkptmapError, PlanError
from ckptmap.formats.gguf.splits import holds_gguf
from ckptmap.formats.safetensors.file import LFS_MAGIC
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.hub.resolve import locate
from ckptmap.storage.json_file import read_object, why_no_file
from ckptmap.storage.resource_limits import unreadable

CONFIG = "config.json"
MAX_NBYTES = 64 << 20
OTHER = "give the model's config.json with --config-from PATH"


def read_config(path: str | os.PathLike[str], mounts: Mounts) -> dict[str, object]:
    """Return a config.json, or the one in a directory, on this machine or on the Hub.

    Raises PlanError CKM605 where it cannot be read as a JSON object.
    """
    file = locate(path, mounts).path
    file = file / CONFIG if file.is_dir() else file
    try:
        return read_object(file, mounts, max_nbytes=MAX_NBYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(file, error) from error
        problem = f"cannot be read as JSON: {error}"
        if isinstance(error, ValueError) and _is_pointer(file, mounts):
            problem = "is a Git LFS pointer, not the config itself"
        raise PlanError("CKM605", f"{file}: {problem}", OTHER) from error


def types_within(config: object) -> list[str]:
    """Return the `model_type` of a config.json and of the models that it consists of."""
    if not isinstance(config, dict):
        return []
    inner = [kind for value in config.values() for kind in types_within(value)]
    own = config.get("model_type")
    return [own, *inner] if isinstance(own, str) else inner


def _is_pointer(file: Path, mounts: Mounts) -> bool:
    with mounts.local_copy(file).open("rb") as handle:
        return handle.read(len(LFS_MAGIC)) == LFS_MAGIC


def config_beside(path: str, mounts: Mounts, asked: str | None = None) -> dict[str, object] | None:
    """Return the config at `asked`, a GGUF file too, else the one beside a checkpoint, else Meta's params.json there, else
    what a GGUF file says. It goes first where the config beside it states no sizes.

    Their sizes are returned under the names of config.json. Returns None where there is none of them. Raises PlanError
    CKM605 for a config.json that cannot be read.
    """
    if asked is not None and not holds_gguf(Path(asked), mounts):
        return read_config(asked, mounts)
    place = Path(path if asked is None else asked)
    folder = place if place.is_dir() else place.parent
    if asked is None and (folder / CONFIG).is_file():
        config = read_config(folder / CONFIG, mounts)
        return _completed(config, place, mounts)
    problem = why_no_file(folder / CONFIG) if asked is None else ""
    if problem:
        raise PlanError("CKM605", f"{folder / CONFIG}: {problem}", OTHER)
    from ckptmap.formats.meta.params_json import PARAMS, read_params  # few have no config.json

    has_params = asked is None and (folder / PARAMS).is_file()
    params = read_params(folder / PARAMS, mounts) if has_params else None
    if params is not None:
        return params.config
    return _of_gguf(place, mounts)


def readable_config(
    path: str, mounts: Mounts, asked: str | None = None
) -> dict[str, object] | None:
    """Return as `config_beside`, and None for one that cannot be read: for callers that nobody has asked to read it.

    Who needs it refuses it, and says why.
    """
    try:
        return config_beside(path, mounts, asked)
    except CkptmapError:
        return None


def _completed(config: dict[str, object], place: Path, mounts: Mounts) -> dict[str, object]:
    """Return the config, or what the GGUF file that it lies beside says, where it states no sizes."""
    if not holds_gguf(place, mounts):
        return config
    from ckptmap.formats.huggingface.bare_config import is_bare  # few sources are GGUF files

    return (_of_gguf(place, mounts) if is_bare(config) else None) or config


def _of_gguf(place: Path, mounts: Mounts) -> dict[str, object] | None:
    """Return the config made of the metadata of a GGUF file; None where the path is none, or they describe no model."""
    if not holds_gguf(place, mounts):
        return None
    from ckptmap.formats.gguf.reader import config_at  # likewise

    return config_at(place, mounts)


def as_config(config: object) -> dict[str, object] | None:
    """Return the config that a caller passes as a mapping, a transformers config, a path or None."""
    if config is None or isinstance(config, Mapping):
        return None if config is None else dict(config)
    if isinstance(config, str | os.PathLike):
        with closing(Mounts()) as mounts:
            return read_config(config, mounts)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    raise PlanError(
        "CKM605", f"config is a {type(config).__name__}, expected a dict, a transformers config or"
        " a path", "pass model.config",
    )  # fmt: skip
