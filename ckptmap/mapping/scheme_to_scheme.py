"""Map names from one scheme to another through the hub's names, without doing the work twice.

The two mappings are composed as integer index maps. `meta -> hf -> torchtune` permutes rows and then
permutes them back, so the composition is a plain rename and the bytes are never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckptmap.core.strided_boxes import Piece, StridedBox, compose
from ckptmap.errors import PlanError
from ckptmap.mapping.resolve import MappedTensor, Resolution, resolve
from ckptmap.mapping.rule_tensors import is_whole
from ckptmap.mapping.rules import NamingScheme
from ckptmap.tensors import Box, TensorInfo


def translate(
    infos: Mapping[str, TensorInfo],
    source: NamingScheme | None,
    target: NamingScheme | None,
    config: Mapping[str, object] | None,
    *,
    complete: bool = True,
    left: Collection[str] = (),
) -> Resolution:
    """Return what becomes of each key on the way from `source` to `target`.

    None stands for the hub's names of a model whose family is unknown. `left` are keys that exist but
    stay behind, so rules do not report them missing.

    Raises PlanError CKM605 to CKM608, 613, 614, 617.
    """
    if target is None or target.is_hub:
        return _to_hub(infos, source, config, complete, left)
    if source is None or source.is_hub:
        return resolve(target, infos, to_hub=False, config=config, complete=complete, left=left)
    there = _to_hub(infos, source, config, complete, left)
    hub = {made.name: made.info for made in there.made.values()}
    back = resolve(
        target, hub, to_hub=False, config=config, complete=complete, left=there.left
    )  # fmt: skip
    return Resolution(
        made={name: _through(made, there.made, infos) for name, made in back.made.items()},
        dropped={**there.dropped, **_named(back.dropped, there.made)},
        unmapped=(*there.unmapped, *_keys(back.unmapped, there.made)),
        tied={**back.tied},
        used={**there.used, **back.used},
    )


def _to_hub(
    infos: Mapping[str, TensorInfo],
    source: NamingScheme | None,
    config: Mapping[str, object] | None,
    complete: bool,
    left: Collection[str],
) -> Resolution:
    if source is not None:
        return resolve(source, infos, to_hub=True, config=config, complete=complete, left=left)
    made = {name: MappedTensor(name, info, name) for name, info in infos.items()}
    return Resolution(made, {}, ())


def _keys(names: Sequence[str], made: Mapping[str, MappedTensor]) -> list[str]:
    """Return the source keys that the given hub names are made of."""
    return list(dict.fromkeys(key for name in names for key in made[name].sources))


def _named(dropped: Mapping[str, str], made: Mapping[str, MappedTensor]) -> dict[str, str]:
    return {key: why for name, why in dropped.items() for key in made[name].sources}


def _through(
    made: MappedTensor, there: Mapping[str, MappedTensor], infos: Mapping[str, TensorInfo]
) -> MappedTensor:
    """Return a target that is made of hub tensors as one made of the first scheme's tensors."""
    if made.source is not None:
        first = there[made.source]
        if made.name == first.name and not made.ops:
            return first
        return first._replace(name=made.name, info=made.info, ops=(*first.ops, *made.ops))
    if all(there[name].source is not None and not there[name].ops for name in made.sources):
        names = {name: there[name].source for name in made.sources}
        if all(name == source for name, source in names.items()):
            return made
    pieces: list[Piece] = []
    for name in made.sources:
        taken = [piece for piece in made.pieces if piece.source == name]
        pieces += compose(pieces_of(there[name], infos), taken)
    whole = len(pieces) == 1 and is_whole(pieces[0], infos[pieces[0].source], made.info)
    return made._replace(
        source=pieces[0].source if whole else None,
        pieces=() if whole else tuple(pieces),
        ops=(*_same_ops(made, there), *made.ops),
    )


def _same_ops(
    made: MappedTensor, there: Mapping[str, MappedTensor]
) -> tuple[tuple[str, bool], ...]:
    ops = {there[name].ops for name in made.sources}
    if len(ops) > 1:
        raise PlanError(
            "CKM613",
            f"{made.name}: would be made of tensors with different value operations:"
            f" {', '.join(made.sources)}",
            "convert to the hub's names first with --names hf, then convert the result",
        )
    return next(iter(ops), ())


def pieces_of(made: MappedTensor, infos: Mapping[str, TensorInfo]) -> Sequence[Piece]:
    """Return the pieces of a target; one that is only renamed is a single piece."""
    if made.source is None:
        return made.pieces
    whole = StridedBox.of_box(Box.whole(infos[made.source].shape))
    return (Piece(made.source, whole, whole),)
