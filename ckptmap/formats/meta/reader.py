"""Read Meta's checkpoints: `consolidated.00.pth`, `consolidated.01.pth`, ..., one file per rank of
model parallelism.

    column-parallel wq wk wv w1 w3 output    N x [rows / N, cols] -> [rows, cols]
    row-parallel    wo w2                    N x [rows, cols / N] -> [rows, cols]
    norms, rope.freqs                        whole on every rank

The embedding is cut by columns in Llama 1 and 2 (`ParallelEmbedding`), by rows since Llama 3
(`VocabParallelEmbedding`). The length of `norm.weight` tells which. `params.json`, if it is there,
gives the shapes of the tensors, and so the number of ranks. Source: meta-llama/llama-models,
models/llama3/model.py and models/checkpoint.py; fairscale, nn/model_parallel/layers.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path as FilePath

from ckptmap.core.printable import quote
from ckptmap.errors import SourceError
from ckptmap.formats.meta.params_json import PARAMS, Params, read_params
from ckptmap.formats.rank_files.rank_trees import RankReader, RankSet, RankTree
from ckptmap.formats.zip.reader import is_zip
from ckptmap.protocols import Index, Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.tensor_parallel import WHOLE, Partition, join_parts, whole_info
from ckptmap.storage.files import Files
from ckptmap.tensors import FLOATING, Leaf, Path, StoredTensor

_NAME = re.compile(r"consolidated\.(\d+)\.pth")
_FP8 = re.compile(r"fp8_scales_\d+\.pt")
_COLUMN = re.compile(r"layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])\.weight|output\.weight")
_ROW = re.compile(r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight")
_WO = re.compile(r"layers\.\d+\.attention\.wo\.weight")
_KV = re.compile(r"layers\.\d+\.attention\.w[kv]\.weight")
_SAME = re.compile(r"(layers\.\d+\.(attention|ffn)_norm|norm)\.weight|rope\.freqs")
_EXPERTS = re.compile(r".*\.(experts|block_sparse_moe|router_DE|gate)\b.*")
_EMBEDDING, _NORM = "tok_embeddings.weight", "norm.weight"
_ONE_SAVE = "the files are not of one model, or one is damaged; download them again"


class Consolidated:
    """Reads the files of all model-parallel ranks as one model."""

    name = "consolidated"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with such zip files, or for one of the files.

        A single file that holds a whole model is not claimed: it is a plain torch.save file.
        """
        path = FilePath(place.path).absolute()
        if not place.is_dir and not _NAME.fullmatch(path.name):
            return False
        root, names = _listed(place)
        zips = [name for name in names if is_zip(root / name, place.mounts)]
        return len(zips) > 1 or (len(zips) == 1 and _is_part(root, zips[0], place.mounts))

    def index(self, place: Place) -> Index:
        """Return the tensors of all ranks, joined.

        Raise SourceError CKM110 if ranks are missing, CKM111 for FP8 with scales in other files,
        CKM112 if shapes are not those of params.json, CKM113 if the ranks' parts differ, CKM118 for
        a tensor of which the cut is not known, and the errors of reading a torch.save file.
        """
        root, names = _listed(place)
        if not place.is_dir and len(names) > 1:
            raise SourceError(
                "CKM110",
                f"{place.path}: holds a part of the model, as the file of one rank of {len(names)}",
                f"open the directory of all ranks: {quote(str(root))}",
            )
        _refuse_fp8(place)
        params = _params(root, place.mounts)
        files = _files(root, names)
        trees = _trees(files, place.mounts)
        _check_world(root, trees[0], len(trees), params)
        leaves = _Join(RankSet(trees), params, str(root)).leaves()
        used = (*files, params.where) if params is not None else tuple(files)
        return Index(self.name, leaves, used, world=len(trees))


def _listed(place: Place) -> tuple[FilePath, list[str]]:
    """Return the directory of the place, and the names of its `consolidated` files."""
    path = FilePath(place.path).absolute()
    if place.is_dir:
        return path, [name for name in place.names if _NAME.fullmatch(name)]
    try:
        names = [file.name for file in path.parent.iterdir()]
    except OSError:  # its permissions may allow opening its files, but not listing them
        names = [path.name]
    return path.parent, sorted(name for name in names if _NAME.fullmatch(name))


def _params(root: FilePath, mounts: Mounts) -> Params | None:
    return read_params(root / PARAMS, mounts) if (root / PARAMS).is_file() else None


def _is_part(root: FilePath, name: str, mounts: Mounts) -> bool:
    """Return True if the only file is that of one rank of several.

    Return False if the file cannot be read: the reader of single files reports that."""
    try:
        files = _files(root, [name])
        _check_world(root, _trees(files, mounts)[0], 1, _params(root, mounts))
    except SourceError as error:
        return error.code == "CKM110"
    return False


def _refuse_fp8(place: Place) -> None:
    scales = [name for name in place.names if _FP8.fullmatch(name)]
    if scales:
        raise SourceError(
            "CKM111",
            f"{place.path}: is Meta's FP8 checkpoint, whose scales lie in {scales[0]}",
            "convert its BF16 checkpoint, or the FP8 one in the Hugging Face form",
        )


# ------------------------------------------------------------------------------------ files


def _files(root: FilePath, names: Sequence[str]) -> list[str]:
    """Return the paths in rank order. Raise SourceError CKM110 if a rank has no file, or two."""
    by_rank = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
    missing = next((rank for rank in range(max(by_rank) + 1) if rank not in by_rank), None)
    if missing is not None:
        raise _missing(root, missing, max(by_rank) + 1, "the files are numbered from 0")
    twice = [name for name in names if _NAME.fullmatch(name) and name not in by_rank.values()]
    if twice:
        raise SourceError(
            "CKM110",
            f"{root}: {twice[0]} and {by_rank[int(twice[0].split('.')[1])]} are of the same rank,"
            " expected one of them",
            "move the stale one to another directory",
        )
    return [str(root / by_rank[rank]) for rank in sorted(by_rank)]


def _missing(root: FilePath, rank: int, world: int, reason: str) -> SourceError:
    return SourceError(
        "CKM110",
        f"{root}: rank {rank} of {world} is missing (consolidated.{rank:02d}.pth): {reason}",
        "copy the files of all ranks, and params.json, into this directory",
    )


def _trees(files: Sequence[str], mounts: Mounts) -> list[RankTree]:
    opened, reader = Files(mounts=mounts), RankReader()
    try:
        return [reader.read(opened, file) for file in files]
    finally:
        opened.close()


def _check_world(root: FilePath, first: RankTree, world: int, params: Params | None) -> None:
    """Raise SourceError CKM110 if there are not as many files as ranks.

    The number of ranks is (heads * head_dim) / (columns of `wo` on one rank). Without params.json,
    heads * head_dim is taken to be the length of the norm.
    """
    key = next((path for path in first.parsed.leaves if _WO.fullmatch(_key(path))), None)
    norm, wo = first.get((_NORM,)), None if key is None else first.get(key)
    if not isinstance(wo, StoredTensor) or not isinstance(norm, StoredTensor):
        return
    dim = norm.info.numel
    if wo.info.dtype not in FLOATING or wo.info.shape[:1] != (dim,) or not wo.info.numel:
        return  # the weight is quantized, so its columns do not count the heads' elements
    columns = dim if params is None else params.n_heads * params.head_dim
    ranks, rest = divmod(columns, wo.info.shape[1])
    if rest or not ranks:  # without params.json, the heads may be narrower or wider than the norm
        return
    reason = f"{_key(key or ())} has {wo.info.shape[1]} of {columns} columns in consolidated.00.pth"
    if ranks > world:
        raise _missing(root, world, ranks, reason)
    if ranks < world:
        raise SourceError(
            "CKM110",
            f"{root}: expected {ranks} files, found {world}: {reason}",
            "move the files of other downloads to another directory",
        )


def _key(path: Path) -> str:
    return ".".join(map(str, path))


# ------------------------------------------------------------------------------------ tensors


class _Join:
    """Joins the tensors of the ranks, and checks their shapes against params.json."""

    def __init__(self, ranks: RankSet, params: Params | None, where: str) -> None:
        self.ranks, self.params, self.where = ranks, params, where
        self.world = len(ranks.trees)

    def leaves(self) -> dict[Path, Leaf]:
        """Return the joined tensors, and the values that all ranks hold."""
        return {path: self._leaf(path, leaf) for path, leaf in self.ranks.merged().items()}

    def _leaf(self, path: Path, leaf: Leaf) -> Leaf:
        parts = [tree.get(path) for tree in self.ranks.trees]
        tensors = [part for part in parts if isinstance(part, StoredTensor)]
        if not tensors:
            return leaf
        key = _key(path)
        if len(tensors) < self.world:
            rank = next(r for r, part in enumerate(parts) if not isinstance(part, StoredTensor))
            raise SourceError(
                "CKM110",
                f"{self.where}: {key}: is in {len(tensors)} of {self.world} files, not in"
                f" consolidated.{rank:02d}.pth",
                _ONE_SAVE,
            )
        whole = join_parts(tensors, self._cut(key, tensors), key, _ONE_SAVE)
        self._prove(key, whole)
        return whole

    def _cut(self, key: str, parts: Sequence[StoredTensor]) -> Partition:
        if _SAME.fullmatch(key):
            return WHOLE
        if _ROW.fullmatch(key):
            return Partition(1)
        if _COLUMN.fullmatch(key):
            return Partition(0, copies=self._copies(parts) if _KV.fullmatch(key) else 1)
        if key == _EMBEDDING:
            return self._embedding(key, parts)
        what = "mixtures of experts" if _EXPERTS.fullmatch(key) else "such a tensor"
        raise SourceError(
            "CKM118",
            f"{self.where}: {key}: is cut over {self.world} ranks, and how Meta cuts {what} is not known",
            "ckptmap knows the text models of Llama 1 to 3; convert the Hugging Face form of this model",
        )

    def _copies(self, parts: Sequence[StoredTensor]) -> int:
        """Return how many neighbouring ranks hold the same key or value head: more than 1 if there
        are fewer such heads than ranks."""
        if self.params is None:
            return 1
        heads, shape = self.params.n_kv_heads, parts[0].info.shape
        repeated = heads < self.world and self.world % heads == 0
        alone = bool(shape) and shape[0] == self.params.head_dim
        return self.world // heads if repeated and alone else 1

    def _embedding(self, key: str, parts: Sequence[StoredTensor]) -> Partition:
        """Return the cut of the embedding, rows or columns: joined, it has as many columns as
        `norm.weight` has elements. Raise SourceError CKM112 if neither fits."""
        norm = self.ranks.trees[0].get((_NORM,))
        shape = parts[0].info.shape
        dim = norm.info.numel if isinstance(norm, StoredTensor) else 0
        for cut in (Partition(0), Partition(1)):
            if len(shape) == 2 and whole_info(parts, cut, key, _ONE_SAVE).shape[1] == dim:
                return cut
        raise SourceError(
            "CKM112",
            f"{self.where}: {key}: expected {dim} columns in all, the length of norm.weight, found"
            f" {parts[0].info} on each of {self.world} ranks",
            _ONE_SAVE,
        )

    def _prove(self, key: str, tensor: StoredTensor) -> None:
        expected = None if self.params is None else self.params.shape(key)
        if self.params is None or expected is None or tensor.info.shape == expected:
            return
        raise SourceError(
            "CKM112",
            f"{self.where}: {key}: expected {list(expected)} by {PARAMS}, found"
            f" {list(tensor.info.shape)} in {self.world} files",
            f"a file or {PARAMS} is of another model; download both again",
        )
