"""Make the errors for zip files that torch.save did not write (TorchScript, torch.export, numpy, Keras)
and for torch.save files from before torch 1.6. Each names what the file is, and a next step.
"""

from __future__ import annotations

import os
import shlex

from ckptmap.errors import SourceError
from ckptmap.formats.detect import LEGACY_MAGIC, LEGACY_NBYTES, legacy
from ckptmap.storage.files import Files

_OTHERS = (
    ("constants.pkl", "a TorchScript archive", "save its state dict: torch.save(torch.jit.load(PATH).state_dict(), OUT)"),
    ("archive_format", "an archive of torch.export", "save its state dict: torch.save(torch.export.load(PATH).state_dict, OUT)"),
    (".npy", "numpy's .npz", "save its arrays as tensors with safetensors or torch.save"),
    ("model.weights.h5", "a Keras archive", "give a PyTorch checkpoint; ckptmap does not read Keras files"),
)  # fmt: skip
"""The end of a member's name, what a zip with such a member is, and the next step."""


def before_zip(files: Files, file: str, base: int) -> SourceError | None:
    """Return the error for a file in the format before torch 1.6; None: it has another format."""
    with files.descriptor(file) as fd:
        head = os.pread(fd, LEGACY_NBYTES, base)
    return legacy(file) if LEGACY_MAGIC.match(head) else None


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
            f"{file}: holds no object: an error ended torch.save before it had written one",
            "use an earlier checkpoint, or save again",
        )
    if names and not whole:
        names_text = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        what = f"is a zip without data.pkl, not a torch.save file; it holds {names_text:.200}"
        command = shlex.join(["unzip", file, "-d", file.removesuffix(".zip") + ".unpacked"])
        return SourceError(
            "CKM105", f"{file}: {what}", f"unpack it if a checkpoint is inside: {command}"
        )
    return None
