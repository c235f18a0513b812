"""Tell from the tensors in rank files how many ranks wrote them, and that each rank wrote its own file.

A DTensor states the ranks of its mesh, and a ShardedTensor the world size; the names of files may lie.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptmap.core.formatting import counted
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.rank_trees import RankTree
from ckptmap.sharding.dtensor_spec import first_mesh, is_dtensor, shares_no_rank
from ckptmap.sharding.sharded_tensor_spec import check_writer, is_sharded, other_writer


def stated_world(files: Mapping[int, str], trees: Mapping[int, RankTree]) -> tuple[int, bool]:
    """Return the world size that the tensors state (0 if they state none), and whether it is exact.

    A pipeline stage with a mesh of its own knows its own ranks only. Then the number is a lower bound.
    `files` and `trees` map a rank to its file and to what the file holds. Raise SourceError CKM110 if
    a file was written by another rank than its name says, or the files by several jobs.
    """
    stated: dict[int, int] = {}
    for rank, tree in trees.items():
        world = check_writer(tree.first(is_sharded), rank, files[rank])
        if world is not None:
            stated.setdefault(world, rank)
    if len(stated) > 1:
        (one, first), (other, second) = list(stated.items())[:2]
        raise SourceError(
            "CKM110",
            f"{files[second]}: was saved by {counted(other, 'rank')}, but the file of rank {first} by {one}",
            "copy the files of one save into a directory of their own",
        )
    if stated:
        return next(iter(stated)), True
    by_rank = {rank: _mesh_ranks(tree, rank, files[rank]) for rank, tree in trees.items()}
    meshes = _stages(by_rank)
    if len(meshes) > 1 or (meshes and not all(by_rank.values())):
        return max(map(max, meshes)) + 1, False
    mesh = len(next(filter(None, by_rank.values()), ()))
    return mesh, mesh > 0


def _mesh_ranks(tree: RankTree, rank: int, file: str) -> tuple[int, ...]:
    """Return the ranks of the mesh of a file's first DTensor; empty if it holds none.

    A rank is numbered in the job, or in the mesh of its pipeline stage. Raise SourceError CKM110 if
    the file was written by another rank than its name says.
    """
    mesh = first_mesh(tree.first(is_dtensor))
    if mesh is None:
        return ()
    ranks, wrote = mesh.ranks, mesh.rank
    in_stage = ranks[rank] if rank < len(ranks) else None
    if (
        wrote is not None
        and wrote not in (rank, in_stage)
        and (rank in ranks or in_stage is not None)
    ):
        raise other_writer(file, wrote, rank)
    return ranks


def _stages(by_rank: Mapping[int, tuple[int, ...]]) -> Collection[tuple[int, ...]]:
    """Return the distinct meshes of the ranks; `by_rank` maps a rank to the ranks of its mesh.

    Return an empty tuple if a rank is not in its own mesh, or if two meshes share a rank.
    """
    meshes: dict[tuple[int, ...], set[int]] = {}
    for rank, ranks in by_rank.items():
        known = not ranks or ranks in meshes
        if (ranks and rank not in ranks) or not (known or shares_no_rank(ranks, meshes.values())):
            return ()
        if not known:
            meshes[ranks] = set(ranks)
    return meshes
