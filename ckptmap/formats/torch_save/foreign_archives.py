"""Errors for files that look like a torch.save zip and are not: what each is, and a next step."""

from __future__ import annotations

import os

from ckptmap.errors import SourceError
from ckptmap.formats.detect import LEGACY_MAGIC, LEGACY_NBYTES, legacy
from ckptmap.storage.files import Files

_OTHERS = (
    ("constants.pkl", "a TorchScript archive", "torch.save(torch.jit.load(PATH).state_dict(), ...)"),
    ("archive_format", "an archive of torch.export", "save the state dict of the model instead"),
    (".npy", "numpy's .npz", "save a state dict with safetensors or torch.save"),
    ("model.weights.h5", "a Keras archive", "convert a PyTorch checkpoint"),
)  # fmt: skip
"""End of a member's name -> what such a zip is, and what to do."""


def before_zip(files: Files, file: str, base: int) -> SourceError | None:
    """Return the error for a file in the format before torch 1.6; None: it has another format."""
    with files.descriptor(file) as fd:
        found = os.pread(fd, LEGACY_NBYTES, base)
    return legacy(file) if LEGACY_MAGIC.match(found) else None


def other_zip(file: str, base: int) -> SourceError | None:
    """Return the error for a zip that another program wrote (TorchScript, numpy, Keras); None: it is
    not one of these."""
    import zipfile

    if base:  # an item inside a file
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return None
    for end, what, hint in _OTHERS:
        if any(name.endswith(end) for name in names):
            return SourceError("CKM105", f"{file}: is {what}, not a torch.save file", hint)
    whole = any(name.endswith("/data.pkl") for name in names)
    if not whole and any(name.endswith("/.data/serialization_id") for name in names):
        return SourceError(
            "CKM105",
            f"{file}: holds nothing: an error ended torch.save before it had written the object",
            "use an earlier checkpoint",
        )
    if names and not whole:
        held = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        what = f"is a zip without data.pkl, not a torch.save file; it holds {held:.200}"
        return SourceError("CKM105", f"{file}: {what}", "unpack it first")
    return None
