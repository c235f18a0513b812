"""Name a file of another program or a packed one by its first bytes, and a directory by its entries, with the next step."""

from __future__ import annotations

import re
from pathlib import Path

from ckptmap.core.printable import quote
from ckptmap.protocols import Place

PYTORCH = "give a PyTorch checkpoint; ckptmap reads no other framework's files"
_ORIGINAL = "convert from the original safetensors instead"
_BARE = "if you trust it, load it with its own program and torch.save a dict of tensors"
FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (b"ggjt", "a GGML file of llama.cpp", _ORIGINAL),
    (b"tjgg", "a GGML file of llama.cpp", _ORIGINAL),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it", PYTORCH),
    (b"\x93NUMPY", "a numpy array", "save a state dict with safetensors or torch.save"),
    (b"\x1f\x8b", "packed with gzip", "unpack it first: gunzip -k {}"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd", "unpack it first: zstd -d {}"),
    (b"\xfd7zXZ", "packed with xz", "unpack it first: xz -dk {}"),
    (b"BZh", "packed with bzip2", "unpack it first: bunzip2 -k {}"),
    *((b"\x80" + bytes([n]), "a bare pickle", _BARE) for n in range(2, 6)),
)
"""The first bytes of a file, what such a file is, and the next step, in which {} becomes the path."""
PACKED_TAR = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$")
TAR_MAGIC = 257
"""Offset of the magic bytes of a tar archive."""
OTHER_FRAMEWORKS = (
    r".*\.(h5|keras|msgpack|ckpt\.index|onnx|tflite)|saved_model\.pb"
    r"|manifest\.ocdbt|_CHECKPOINT_METADATA"
)
OF_UNIVERSAL = (
    "convert the checkpoint that it was made of, in whose directory: python zero_to_fp32.py . OUT"
)
MARKS: tuple[tuple[str, str, str], ...] = (
    (r"\.metadata\.tmp", "an unfinished DCP save (only .metadata.tmp)", "use an earlier checkpoint"),
    (r"__\d+\.metadata", "a DCP save with one metadata file per rank (use_collectives=False)", "save it again with use_collectives=True"),
    (r"zero_to_fp32\.py|(bf16_)?zero_pp_rank_.*", "a DeepSpeed checkpoint", "convert it first with its own script: cd {} && python zero_to_fp32.py . OUT"),
    (r"latest_universal", "a universal checkpoint of DeepSpeed", OF_UNIVERSAL),
    (r"adapter_config\.json", "a peft adapter without its base weights", ""),  # merge_step
    (r".*\.distcp", "DCP data files without their .metadata", "copy .metadata too; if there is none, the save did not finish: use an earlier checkpoint"),
    (r".*\.ggml", "GGML weights", "convert them from the original safetensors"),
    (OTHER_FRAMEWORKS, "a directory of weights of another framework", PYTORCH),
)  # fmt: skip
"""A pattern of the whole name of an entry, what a directory with such an entry is, and the next step; that of an
adapter depends on its kind."""


def foreign_file(place: Place) -> tuple[str, str] | None:
    """Return what a file of another program is, and a hint; None if its program is not known."""
    for magic, what, hint in FOREIGN:
        if place.head.startswith(magic):
            if PACKED_TAR.search(place.path):  # tar finds out what it is packed with
                return (
                    f"a tar archive {what}",
                    f"unpack it first: tar -xf {quote(place.path)}",
                )
            return what, hint.replace("{}", quote(place.path))
    if place.head[TAR_MAGIC:].startswith(b"ustar"):
        return "a tar archive", f"unpack it first: tar -xf {quote(place.path)}"
    if re.fullmatch(OTHER_FRAMEWORKS, Path(place.path).name):
        return "by its name a file of another framework", PYTORCH
    return None


def mark(place: Place) -> tuple[str, str] | None:
    """Return what a directory is by the first pattern of MARKS that an entry matches, and a hint."""
    for pattern, what, hint in MARKS:
        if any(re.fullmatch(pattern, name) for name in place.names):
            return what, hint
    return None
