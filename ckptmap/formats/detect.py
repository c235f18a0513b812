"""Look at a path before its headers are read, and explain a path that is not a checkpoint.

`look` returns the first bytes of a file, or the entries of a directory. `find` returns the checkpoint
at that place, or the only one inside it. `refuse_place` returns the error that names what lies there
instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptmap.core.formatting import natural, some
from ckptmap.core.printable import join, quote
from ckptmap.errors import SourceError
from ckptmap.protocols import Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.own_files import PENDING
from ckptmap.storage.peft_adapter import ADAPTER_CONFIG, merge_step
from ckptmap.storage.resource_limits import or_resource_error

HEAD_NBYTES = 512


def look(path: Path, mounts: Mounts | None = None) -> Place:
    """Return the first bytes, or the entries, of a path. Raise SourceError CKM101 if it cannot be read."""
    mounts = Mounts() if mounts is None else mounts
    try:
        if path.is_dir():
            names = sorted((entry.name for entry in os.scandir(path)), key=natural)
            return Place(str(path), True, names=tuple(names), mounts=mounts)
        if path.exists() and not path.is_file():
            raise SourceError(
                "CKM101",
                f"{path}: is neither a file nor a directory",
                "give the path of a checkpoint",
            )
        return Place(str(path), False, head=mounts.read_head(path, HEAD_NBYTES), mounts=mounts)
    except OSError as error:
        raise or_resource_error(error, _unreadable(path, error)) from error
    except SourceError:
        raise
    except ValueError as error:  # a lone surrogate, or a zero byte
        raise SourceError(
            "CKM101", f"{path}: no file can have this name", "check the path"
        ) from error


def _unreadable(path: Path, error: OSError) -> SourceError:
    if isinstance(error, FileNotFoundError):
        # imported here: only this error needs it
        from ckptmap.storage.pending_saves import why_absent

        if (found := why_absent(path)) is not None:
            state, hint = found
            return SourceError("CKM101", f"{path}: {state}", hint)
    problem = (error.strerror or str(error)).lower()
    return SourceError("CKM101", f"{path}: {problem}", _way_to(path, error))


def _way_to(path: Path, error: OSError) -> str:
    """Return the hint for a path that cannot be read: most often a file with a similar name."""
    if isinstance(error, PermissionError):
        return f"check its permissions: ls -ld {quote(str(path))}"
    if not isinstance(error, FileNotFoundError):
        return "check the path"
    if path.is_symlink():
        return f"it is a symbolic link to {path.readlink()}, which does not exist: correct the link"
    import difflib  # imported here: it is slow, and only this error needs it

    try:
        beside = [name for name in os.listdir(path.parent) if name != path.name]
        near = difflib.get_close_matches(path.name, beside, n=1)
    except OSError:
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not str(path).startswith(".")
        return f"for a model on the Hub write hf://{path}" if hub else "check the path"
    return f"did you mean {path.parent / near[0]}?" if near else "check the path"


TEXT = re.compile(rb"[\n\r\t -~]{4,}")
"""The head of a plain text: `Entry not found`, as the Hub answers."""
SIDE_FILES = re.compile(
    r"(data|dataloader.*|training_args|optim.*|scheduler|scaler|recipe_state|rng_state.*)\.(pt|pth|bin|ckpt)"
    r"|random_states_\d+\.pkl|optimizer_\d+"
)
"""Names of files that training frameworks write beside weights; none is a checkpoint by itself."""


ZERO_PART = re.compile(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt")
"""Files of DeepSpeed. Under ZeRO-3 the weights in them are empty placeholders, which would convert
without an error."""
ZERO_MODEL = re.compile(r"mp_rank_\d+_model_states\.pt")
"""The model's file of DeepSpeed under stages 0, 1 and 2, with weights in 16 bits."""
DCP_PART = re.compile(r"__\d+_\d+\.distcp|\.metadata")
UNFINISHED = "tmp_"
"""How the name of a directory of torch_checkpointing begins until all ranks have written it."""
SHARD = re.compile(r".+-\d{5}-of-(\d{5})\.(safetensors|bin)")


def find(place: Place, is_checkpoint: Callable[[Place], bool]) -> tuple[Place, tuple[str, ...]]:
    """Return the place itself, or the only checkpoint inside it, with notes that name it.

    Raise SourceError CKM111 with the candidates if there are several, otherwise the error of
    `refuse_place`.
    """
    _refuse_part(place)
    if is_checkpoint(place):
        return place, _one_of_many(place)
    if place.is_dir and _mark(place) is None and not adapters_in(place):
        checkpoints = _candidates(place, is_checkpoint)
        if len(checkpoints) == 1:
            only = look(Path(place.path) / checkpoints[0], place.mounts)
            _refuse_part(only)
            folder = look(Path(only.path).parent, place.mounts)
            if (
                not only.is_dir and _mark(folder) is not None
            ):  # what a save left that did not finish
                raise refuse_place(folder, is_checkpoint)
            return only, (
                f"opened {checkpoints[0]}, the only checkpoint in the directory",
                *_left_beside(only),
                *_one_of_many(only),
            )
    raise refuse_place(place, is_checkpoint)


def _refuse_part(place: Place) -> None:
    """Raise SourceError CKM111 for a part of a checkpoint that looks like a whole checkpoint."""
    path = Path(place.path)
    if place.is_dir and PENDING in place.names:
        raise SourceError(
            "CKM111",
            f"{path}: is not complete: ckptmap publishes it now, or was killed while it did ({PENDING})",
            "wait, or run the command that wrote it again, which finishes it",
        )
    if place.is_dir:
        return
    if ZERO_PART.fullmatch(path.name):
        raise SourceError(
            "CKM111",
            f"{path}: is the part of one rank of a DeepSpeed checkpoint",
            f"give the path of the directory: {quote(str(path.parent))}",
        )
    if kind := _rank_file(path, place.mounts):
        raise SourceError(
            "CKM111",
            f"{path}: is one file of {kind}",
            f"give the path of the directory: {quote(str(path.parent))}",
        )


def _rank_file(path: Path, mounts: Mounts) -> str:
    """Return what a file is a part of that holds parts of tensors and does not tell so; "": nothing."""
    if DCP_PART.fullmatch(path.name):
        return "a DCP directory"
    if path.suffix != ".safetensors" or not path.with_name("metadata.pkl").is_file():
        return ""
    from ckptmap.formats.torch_checkpointing.metadata import is_one_of_several

    return "a torch_checkpointing directory" if is_one_of_several(path, mounts) else ""


def _left_beside(place: Place) -> tuple[str, ...]:
    """Return a note that names files of training beside the file that was opened in their directory."""
    if place.is_dir:
        return ()
    beside = [*filter(SIDE_FILES.fullmatch, look(Path(place.path).parent, place.mounts).names)]
    return (f"left behind: {some(beside)}",) if beside else ()


def _one_of_many(place: Place) -> tuple[str, ...]:
    """Return a note if the name of a file says that it is one of several shards, or DeepSpeed's copies."""
    path = Path(place.path)
    match, parent = SHARD.fullmatch(path.name), path.parent
    if not place.is_dir and ZERO_MODEL.fullmatch(path.name):
        beside = any(map(ZERO_PART.fullmatch, look(parent, place.mounts).names))
        note = f"the weights in fp32 and the optimizer are in files beside it; give {quote(str(parent))}"
        return (note,) if beside else ()
    if place.is_dir or match is None or int(match[1]) < 2:
        return ()
    return (
        f"this is one of {int(match[1])} files of a model; to open all of them, give {quote(str(parent))}",
    )


def refuse_place(place: Place, is_checkpoint: Callable[[Place], bool]) -> SourceError:
    """Return the error for a path that no format recognises."""
    return _of_directory(place, is_checkpoint) if place.is_dir else _of_file(place)


LEGACY_MAGIC = re.compile(
    rb"\x80[\2-\5](\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\.|L119547037146038801333356L\n\.",
    re.DOTALL,
)
"""The pickled magic number at the start of a torch.save file older than torch 1.6, in any pickle
protocol (torch/serialization.py, MAGIC_NUMBER)."""
LEGACY_NBYTES = 32
"""Bytes from the start of a file that are enough for LEGACY_MAGIC to match."""


def legacy(path: str) -> SourceError:
    """Return the error for a file that begins with `LEGACY_MAGIC`."""
    return SourceError(
        "CKM117",
        f"{path}: is in the torch.save format from before torch 1.6",
        "save it again with a current torch: " + saved_again(path, PLAIN_LOAD),
    )


PLAIN_LOAD = 'torch.load({}, map_location="cpu", weights_only=True)'
"""Loads tensors and no other object."""


def saved_again(path: str, load: str) -> str:
    """Return the command that saves what `load` makes of a file beside it; {} in `load` is its path."""
    place = Path(path)
    suffix = place.suffix if place.suffix in (".pt", ".pth", ".bin", ".ckpt") else ".pt"
    old, new = (json.dumps(str(p)) for p in (place, place.with_suffix(f".new{suffix}")))
    code = f"import torch; torch.save({load.replace('{}', old)}, {new})"
    return join(["python", "-c", code])


def _of_file(place: Place) -> SourceError:
    from ckptmap.formats.foreign_files import foreign_file, text_pickle  # only a refusal needs them

    head, path = place.head, place.path
    nbytes = Path(path).stat().st_size
    if not head:
        return SourceError("CKM101", f"{path}: is empty (0 bytes)", "copy or download it again")
    if head.startswith(b"version https://git-lfs"):
        return SourceError(
            "CKM102",
            f"{path}: is a Git LFS pointer ({nbytes} bytes), not weights",
            "fetch the file itself: git lfs pull",
        )
    if head.lstrip()[:1] == b"{" and path.endswith(".json"):
        return SourceError(
            "CKM103",
            f"{path}: is a JSON file, which holds no weights",
            f"if it describes weights, give its directory: {quote(str(Path(path).parent))}",
        )
    if head.lstrip()[:1] in (b"<", b"{", b"[") or (TEXT.fullmatch(head) and not text_pickle(head)):
        return SourceError(
            "CKM103",
            f"{path}: is text, not weights: it begins {head[:24].decode('latin-1').strip()!r}",
            "the download may have saved an error page; download the file again",
        )
    if LEGACY_MAGIC.match(head):
        return legacy(path)
    foreign = foreign_file(place)
    if foreign is not None:
        what, hint = foreign
        return SourceError("CKM101", f"{path}: is {what}, which ckptmap does not read", hint)
    if not head.strip(b"\0"):
        return SourceError(
            "CKM104",
            f"{path}: begins with zeros, expected a checkpoint: {nbytes} bytes were reserved and not written",
            "copy or download it again, or use an earlier checkpoint",
        )
    if nbytes < 16:
        return SourceError(
            "CKM104",
            f"{path}: truncated, expected a checkpoint, found {nbytes} bytes",
            "copy it again",
        )
    return SourceError(
        "CKM101",
        f"{path}: expected a torch.save zip or safetensors, found a file that begins {head[:8].hex(' ')}",
        "give the path of a checkpoint; `ckptmap doctor` lists the formats",
    )


BESIDE_WEIGHTS = re.compile(r"config\.json|tokenizer(_config)?\.(json|model)|vocab\.(json|txt)")
"""Files that lie beside a model's weights. Without weights they make no checkpoint."""


TUNE_PART = re.compile(r"hf_model_\d{4}_\d+\.pt")
"""What torchtune before 0.5 calls the parts of a model; the last number is the epoch."""
HUB_CACHE = "models--"
"""How the folders of models begin in the Hub's cache (HF_HOME/hub). Each holds `snapshots`, whose files are links into
`blobs`."""


def _of_directory(place: Place, is_checkpoint: Callable[[Place], bool]) -> SourceError:
    if not place.names:
        return SourceError("CKM101", f"{place.path}: is an empty directory", "check the path")
    mark = _mark(place)
    if mark is not None:
        hint = mark[1].replace("{}", quote(place.path))
        hint = hint or merge_step(Path(place.path), place.mounts)
        return SourceError("CKM111", f"{place.path}: is {mark[0]}", hint)
    checkpoints = _candidates(place, is_checkpoint)
    adapters = adapters_in(place)
    if adapters and {name.partition("/")[0] for name in checkpoints} <= set(adapters):
        return SourceError(
            "CKM111",
            f"{place.path}: holds peft adapters without their base weights: {', '.join(adapters[:6])}",
            f"take one of them: {merge_step(Path(place.path) / adapters[-1], place.mounts)}",
        )
    parts = list(filter(TUNE_PART.fullmatch, checkpoints))
    if len(parts) > 1:
        return SourceError(
            "CKM111",
            f"{place.path}: holds parts of one model, as torchtune names them, and not how many there are: {some(parts)}",
            f"if none is missing, name them as shards: pytorch_model-00001-of-{len(parts):05d}.bin, and so on",
        )
    if checkpoints:
        return SourceError(
            "CKM111",
            f"{place.path}: is not a checkpoint, but holds some: {some(checkpoints)}",
            _choice(Path(place.path), checkpoints),
        )
    names_text = ", ".join(place.names[:6]) + (", ..." if len(place.names) > 6 else "")
    description, hint = "a directory without a checkpoint", "check the path"
    if "zero_to_fp32.py" in place.names:
        description = "the directory of a DeepSpeed checkpoint without the folder of its step"
        hint = "copy the folder here that the file latest names, or give its path"
    elif any(map(BESIDE_WEIGHTS.fullmatch, place.names)):
        description = "a directory of a model's config and tokenizer without its weights"
        hint = "give the directory that holds the weights too, or fetch them: hf download REPO"
    return SourceError("CKM111", f"{place.path}: is {description}; it holds {names_text}", hint)


def _choice(place: Path, names: Sequence[str]) -> str:
    """Return the hint that names one of several checkpoints: the newest of the steps of a run, else the first."""
    if len({re.sub(r"\d+", "", name) for name in names}) == 1 and re.search(r"\d", names[0]):
        return f"give the path of one; the highest number has {quote(str(place / names[-1]))}"
    unnumbered = [name for name in names if not re.search(r"\d", name)]
    return f"give the path of one: {quote(str(place / (unnumbered or names)[0]))}"


def adapters_in(place: Place) -> list[str]:
    """Return the entries that are peft adapters: save_pretrained writes a folder for each."""
    ends = [(name, os.path.join(place.path, name, ADAPTER_CONFIG)) for name in place.names[:200]]
    return [name for name, end in ends if os.path.isfile(end)]  # Path.is_file may raise


def _mark(place: Place) -> tuple[str, str] | None:
    """Return what a directory is that is no checkpoint, and a hint; None: nothing marks it."""
    from ckptmap.formats.foreign_files import mark_of  # deferred: only what is refused needs it

    return mark_of(place)


def _candidates(place: Place, is_checkpoint: Callable[[Place], bool]) -> list[str]:
    """Return the names of the checkpoints in a directory and in the folders inside it.

    In the Hub's cache they are snapshots: a blob is a weight file without the config beside it.
    """
    names: list[str] = []
    cached = "blobs" in place.names and "snapshots" in place.names
    for name in place.names[:200]:
        if name.startswith(".") or SIDE_FILES.fullmatch(name) or (cached and name == "blobs"):
            continue
        child = Path(place.path) / name
        try:
            seen = look(child, place.mounts)
            if is_checkpoint(seen):
                names.append(name)
            elif seen.is_dir and name.startswith(HUB_CACHE):
                names += [f"{name}/{n}" for n in _candidates(seen, is_checkpoint)]
            elif seen.is_dir:
                names += [
                    f"{name}/{n}"
                    for n in seen.names[:50]
                    if not SIDE_FILES.fullmatch(n) and is_checkpoint(look(child / n, place.mounts))
                ]
        except SourceError:
            continue
    return [name for name in names if not name.startswith(UNFINISHED)] or names
