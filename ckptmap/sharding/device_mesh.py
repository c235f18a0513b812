"""Shard tensors over a device mesh: FSDP2, HSDP, and tensor parallelism (TP) by a plan of names.

    --mesh replicate=2,shard=4              [rows, cols] -> 4 x [rows / 4, cols], each on 2 ranks
    --mesh dp=2,tp=4 --tp-plan plan.toml    colwise: rows over tp, then over dp (_StridedShard)
                                            rowwise: columns over tp, rows over dp

The name of a mesh dim tells what it does: `replicate` (also `ddp`, `dp_replicate`) replicates every
tensor, `tp` cuts the tensors that the plan names, any other name cuts rows, as FSDP2 does. A plan
is a TOML or JSON file that maps a pattern of module or tensor names to a style, in the form of
`base_model_tp_plan` in a transformers config.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path as FilePath

from ckptmap.core.json_text import parse_json
from ckptmap.errors import PlanError
from ckptmap.protocols import Placement
from ckptmap.sharding.dtensor_spec import cut_rows
from ckptmap.sharding.mesh_rank_boxes import boxes_by_rank
from ckptmap.storage.resource_limits import unreadable
from ckptmap.tensors import BUFFERS, FLOATING, PARAMETERS, Box, Leaf, TensorInfo

STYLES: Mapping[str, tuple[int | None, int | None]] = {
    "colwise": (-2, 0),
    "rowwise": (-1, None),
    "shard(0)": (0, 0),
    "shard(1)": (1, None),
    "replicate": (None, None),
    "colwise_gather_output": (-2, 0),
    "colwise_rep": (-2, 0),
    "rowwise_rep": (-1, None),
    "rowwise_split_input": (-1, None),
    "embedding_rowwise": (0, 0),
    "embedding_colwise": (1, None),
    "sequence_parallel": (None, None),
}
"""Style -> (the dim of a matrix that tp cuts, the dim of a vector); None: replicated over tp. A stack of matrices is cut
as its matrices are. Source: torch's styles, and transformers 5.23, distributed/tensor_parallel.py."""
COMPUTING = frozenset(
    (
        "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert",
        "local_params",
    )
)  # fmt: skip
"""Styles of transformers that change how a module computes and cut none of its tensors."""
PACKED = frozenset(("packed_colwise", "packed_rowwise"))
"""Styles by which a rank holds two runs of a tensor, one of gate and one of up."""
PLAIN = "plain"
"""The style of a tensor that is no DTensor, such as a buffer."""
_EXAMPLE = "for example --mesh replicate=2,shard=4, or --mesh dp=2,tp=4 --tp-plan FILE"


@dataclass(frozen=True)
class Mesh:
    """The layout over one device mesh.

    dims   (name, size) of each mesh dim; by default one dim without a name, of one rank
    plan   pattern of names -> style, for the mesh dim `tp`
    """

    dims: tuple[tuple[str, int], ...] = (("", 1),)
    plan: Mapping[str, str] = field(default_factory=dict)
    name: str = "mesh"

    @property
    def world_size(self) -> int:
        return Placement(self.dims, None).world_size

    def over(
        self,
        mesh: str | None,
        tp_plan: str | None,
        world_size: int | None,
        names: Collection[str],
    ) -> Mesh:
        """Return the layout that `--mesh` and `--tp-plan` describe, for weights of these names.

        Raises PlanError CKM204 if the mesh is malformed, does not have `world_size` ranks, or has a
        dim `tp` without a plan or the reverse; CKM201 if the plan cannot be read; CKM206 if one of
        its patterns matches no tensor.
        """
        dims = _parse(mesh) if mesh is not None else (("", world_size or 1),)
        layout = Mesh(dims, _read_plan(tp_plan) if tp_plan is not None else {})
        if world_size is not None and layout.world_size != world_size:
            raise PlanError(
                "CKM204",
                f"--mesh {mesh}: has {layout.world_size} ranks, --world-size says {world_size}",
                "leave --world-size out",
            )
        if bool(layout._tp_axes()) != bool(layout.plan):
            problem = "has no dim tp, and a --tp-plan is given"
            if layout._tp_axes():
                problem = "has dim tp, and no --tp-plan is given"
            raise PlanError("CKM204", f"--mesh {mesh}: {problem}", _EXAMPLE)
        for pattern in layout.plan:
            if not any(_matches(pattern, fqn) for fqn in names):
                from ckptmap.core.name_globs import suggestion  # here: few commands have a plan

                raise PlanError(
                    "CKM206",
                    f"--tp-plan {tp_plan}: {pattern} matches no tensor, nor a module of one",
                    suggestion(pattern, names) or "write names as `ckptmap inspect` shows them",
                )
        return layout

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """Return (rank, box) pairs of a tensor that is cut by rows over all ranks.

        This is for tensors without a name of their own, which no plan can match.
        """
        return cut_rows(info, world_size)

    def join(self, values: Sequence[Leaf], key: str) -> None:
        """Return None: a pickled DTensor itself states where its local tensor belongs."""
        return None

    def placement(self, fqn: str, info: TensorInfo, whole: bool) -> Placement:
        """Return how a tensor is cut over the mesh, or that every rank holds it as a plain tensor.

        Plain are scalars, tensors of other than floating dtypes, and tensors that the plan calls
        plain. Unless the plan matches them, so are buffers, known by their names, and tensors that
        the source holds whole (`whole`), except parameters, which TP may have left whole.
        """
        style = self._style(fqn)
        last = fqn.rpartition(".")[2]
        buffer = last in BUFFERS or (whole and last not in PARAMETERS)
        if style == PLAIN or not info.shape or info.dtype not in FLOATING:
            return Placement(self.dims, None)
        if style is None and buffer:
            return Placement(self.dims, None)
        shards = tuple(self._shard(name, style, info) for name, _ in self.dims)
        on_mesh = any(shard != Placement.ABSENT for shard in shards)
        return Placement(self.dims, shards if on_mesh else None)

    def chunks(self, placement: Placement, info: TensorInfo) -> Sequence[tuple[int, Box]]:
        """Return each different box with the first rank that holds it; empty boxes are left out.

        An empty tensor keeps its box. Raises PlanError CKM504 if torch cannot hold the tensor in
        this placement.
        """
        first_rank: dict[Box, int] = {}
        for rank, box in enumerate(boxes_by_rank(placement, info)):
            if box.numel or not info.numel:
                first_rank.setdefault(box, rank)
        return [(rank, box) for box, rank in first_rank.items()]

    # ------------------------------------------------------------------ by name

    def _tp_axes(self) -> list[int]:
        return [axis for axis, (name, _) in enumerate(self.dims) if _role(name) == "tp"]

    def _style(self, fqn: str) -> str | None:
        """Return the style of the first pattern that matches the tensor or its module, or None."""
        cutting = ((p, style) for p, style in self.plan.items() if style not in COMPUTING)
        return next((style for pattern, style in cutting if _matches(pattern, fqn)), None)

    def _shard(self, name: str, style: str | None, info: TensorInfo) -> int | None:
        role = _role(name)
        if role == "replicate":
            return None
        if role == "shard":
            return 0
        if style is None:
            return Placement.ABSENT
        dim = STYLES[style][0 if len(info.shape) > 1 else 1]
        return None if dim is None else dim % len(info.shape)


def _matches(pattern: str, fqn: str) -> bool:
    return fnmatchcase(fqn, pattern) or fnmatchcase(fqn.rpartition(".")[0], pattern)


def _role(name: str) -> str:
    if name == "tp":
        return "tp"
    return "replicate" if name == "ddp" or name.endswith("replicate") else "shard"


def _parse(text: str) -> tuple[tuple[str, int], ...]:
    """Return the dims of a mesh: `"replicate=2,shard=4"` -> (("replicate", 2), ("shard", 4)).

    Raises PlanError CKM204 if the text is malformed or its dims are in another order.
    """
    dims = []
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdecimal() or not 0 < int(size) < 1 << 20:
            raise PlanError("CKM204", f"--mesh {text}: {part!r} is not NAME=SIZE", _EXAMPLE)
        dims.append((name, int(size)))
    roles = [_role(name) for name, _ in dims]
    if len(dict(dims)) < len(dims) or any(roles.count(role) > 1 for role in roles):
        raise PlanError(
            "CKM204", f"--mesh {text}: two dims {roles}, expected one of each kind", _EXAMPLE
        )
    if sorted(roles, key=("replicate", "shard", "tp").index) != roles:
        raise PlanError(
            "CKM204", f"--mesh {text}: expected replicate, then shard, then tp", _EXAMPLE
        )
    return tuple(dims)


def _read_plan(path: str) -> dict[str, str]:
    """Return the styles by pattern. Raises PlanError CKM201 if the file is no such plan."""
    from ckptmap.core.toml_text import parse_toml  # here: few commands have a plan

    try:
        text = FilePath(path).read_text(encoding="utf-8")
        plan: object = parse_json(text) if text.lstrip().startswith("{") else parse_toml(text)
    except (OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(path, error) from error
        why = getattr(error, "strerror", None) or error
        raise PlanError("CKM201", f"--tp-plan {path}: {why}", _plan_example(path)) from error
    if not isinstance(plan, dict) or not plan:
        raise PlanError("CKM201", f"--tp-plan {path}: holds no patterns", _plan_example(path))
    for pattern, style in plan.items():
        if isinstance(style, str) and style in PACKED:
            raise PlanError(
                "CKM201",
                f"--tp-plan {path}: {pattern}: {style}: a rank holds two runs of such a tensor, one of gate and one of up,"
                " which ckptmap does not write",
                f"split gate and up in the model, or replicate it over tp: {_plan_example(path, pattern, 'replicate')}",
            )
        if not isinstance(style, str) or (style not in {*STYLES, *COMPUTING} and style != PLAIN):
            known = ", ".join((*STYLES, *sorted(COMPUTING), PLAIN))
            raise PlanError(
                "CKM201", f"--tp-plan {path}: {pattern}: {style!r:.40} is none of {known}",
                _plan_example(path),
            )  # fmt: skip
    return plan


def _plan_example(
    path: str, pattern: str = "model.layers.*.mlp.up_proj", style: str = "colwise"
) -> str:
    name, style = json.dumps(pattern), json.dumps(style)
    if path.endswith(".json"):
        return f"write an object like {{{name}: {style}}}"
    return f"write lines like {name} = {style}"
