"""Read what DeepSpeed pickled: dicts of plain values and tensors, and a few objects of its own classes.

    ZeroStageEnum(2)                      -> 2
    fragment_address(numel=6, start=4)    -> (4, 6)
    LossScaler {cur_scale: 1.0, ...}      -> its attributes

They stay inert records; deepspeed is not imported. A value of another type than DeepSpeed writes is an
error that names the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NoReturn

from ckptmap.errors import SourceError
from ckptmap.formats.torch_save.reader import Loaded, load
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Opaque, StoredTensor

_RANK = re.compile(r".*zero_pp_rank_(\d+)_mp_rank_(\d+)_.*")
_AGAIN = "the file is damaged, or no version of DeepSpeed that is known wrote it; copy it again"


@dataclass(frozen=True)
class Pickled:
    """The dict that a file of DeepSpeed holds."""

    file: str
    tree: Mapping[Any, Any]
    nbytes: int

    @property
    def name(self) -> str:
        return FilePath(self.file).name

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the dict under a key; an empty one where there is none, or None."""
        return self._mapping(self.tree.get(key), key)

    def mappings(self, key: str) -> list[Mapping[str, Any]]:
        """Return the list of dicts under a key; an empty one where there is none, or None."""
        return [self._mapping(each, key) for each in self.sequence(key)]

    def sequence(self, key: str) -> Sequence[Any]:
        """Return the list under a key; an empty one where there is none, or None."""
        value = self.tree.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            self.malformed(key, "a list")
        return value

    def tensors(self, key: str) -> list[StoredTensor]:
        """Return the list of flat tensors under a key."""
        values = self.sequence(key)
        for value in values:
            if not isinstance(value, StoredTensor) or len(value.info.shape) != 1:
                self.malformed(key, "tensors of one dim")
        return list(values)

    def inside(self, key: str) -> Pickled:
        """Return the dict under a key, to read from it in the same way."""
        return Pickled(self.file, self.mapping(key), self.nbytes)

    def count(self, value: object, key: str) -> int:
        """Return a whole number that is not negative."""
        if type(value) is not int or value < 0:
            self.malformed(key, "a number of elements")
        return value

    def shape(self, value: object, key: str) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            self.malformed(key, "shapes")
        return tuple([self.count(size, key) for size in value])

    def fragment(self, value: object, key: str) -> tuple[int, int]:
        """Return (start, numel) of a `fragment_address`."""
        state = value.state if isinstance(value, Opaque) else None
        if not isinstance(state, dict):
            self.malformed(key, "fragment addresses")
        return self.count(state.get("start"), key), self.count(state.get("numel"), key)

    def malformed(self, key: str, expected: str) -> NoReturn:
        raise SourceError("CKM106", f"{self.file}: {key}: expected {expected}", _AGAIN)

    def _mapping(self, value: object, key: str) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str | int) for name in value):
            self.malformed(key, "a dict")
        return value


def read(files: Files, file: str) -> Pickled:
    """Return the dict in a file.

    Raise SourceError CKM110 if the file was saved under the name of another rank, CKM106 if it holds
    no dict, and the errors of `torch_save.reader.load`.
    """
    loaded = load(files, file)
    if not isinstance(loaded.tree, dict):
        raise SourceError("CKM106", f"{file}: expected a dict, as DeepSpeed saves it", _AGAIN)
    _check_own_name(loaded, file)
    return Pickled(file, loaded.tree, loaded.pickle_nbytes)


def _check_own_name(loaded: Loaded, file: str) -> None:
    """torch.save calls the root folder of the zip as the file: it tells files that were swapped."""
    named, saved = _RANK.match(FilePath(file).name), _RANK.match(loaded.records.root + "_")
    if named and saved and named.groups() != saved.groups():
        raise SourceError(
            "CKM110",
            f"{file}: was saved as the file of rank {saved[1]} ({loaded.records.root}.pt)",
            "give the files of the ranks the names again that DeepSpeed gave them",
        )


def stage_of(value: object) -> int:
    """Return the number of a ZeroStageEnum; 0: it is none."""
    if isinstance(value, Opaque) and value.args:
        value = value.args[0]
    return value if type(value) is int else 0


def attributes(value: object) -> Leaf:
    """Return the attributes of an object of DeepSpeed that holds plain values; any other value as it is."""
    if isinstance(value, Opaque) and value.module.startswith("deepspeed.") and not value.args:
        state = value.state
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            return state
    return value  # type: ignore[return-value]
