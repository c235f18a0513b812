"""Make the errors for zip files that torch.save did not write (TorchScript, torch.export, numpy, Keras)
and for torch.save files from before torch 1.6. Each names what the file is, and a next step.
"""

from __future__ import annotations

import os

from ckptmap.core.printable import join
from ckptmap.errors import SourceError
from ckptmap.formats.detect import LEGACY_MAGIC, LEGACY_NBYTES, legacy, saved_again
from ckptmap.storage.files import Files

_SAVED_BY_MODEL = "save the state dict of the model itself: torch.save(model.state_dict(), PATH)"
_OTHERS = (
    ("/constants.pkl", "a TorchScript archive", 'torch.jit.load({}, map_location="cpu").state_dict()', ""),
    ("/models/model.json", "an archive of torch.export", "torch.export.load({}).state_dict", ""),
    (".wrapper.so", "a package of AOTInductor, which is compiled code", "", _SAVED_BY_MODEL),
    ("/archive_format", "an archive of torch.export", "torch.export.load({}).state_dict", ""),
    ("/.data/extern_modules", "an archive of torch.package", "", "if you trust it, load the model by "
     "torch.package.PackageImporter, and save its state dict: torch.save(model.state_dict(), PATH)"),
    (".npy", "numpy's .npz", "{k: torch.tensor(v) for k, v in __import__('numpy').load({}).items()}", ""),
    ("model.weights.h5", "a Keras archive", "", "give a PyTorch checkpoint; ckptmap does not read Keras files"),
)  # fmt: skip
"""The end of a member's name, what a zip with such a member is, and what loads its tensors in Python: the user
may trust the file, and nothing here does. Where no one expression loads them, a hint."""


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
    for end, what, load, hint in _OTHERS:
        if any(f"/{name}".endswith(end) for name in names):
            if load:
                hint = f"if you trust it, save its tensors: {saved_again(file, load)}"
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
        command = join(["unzip", file, "-d", file.removesuffix(".zip") + ".unpacked"])
        return SourceError(
            "CKM105", f"{file}: {what}", f"unpack it if a checkpoint is inside: {command}"
        )
    return None
