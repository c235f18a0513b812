"""Map tensors from one naming scheme to another by way of Hugging Face's names, the hub.

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
        return _resolve_to_hub(infos, source, config, complete, left)
    if source is None or source.is_hub:
        return resolve(target, infos, to_hub=False, config=config, complete=complete, left=left)
    to_hub = _resolve_to_hub(infos, source, config, complete, left)
    hub_infos = {mapped.name: mapped.info for mapped in to_hub.targets.values()}
    from_hub = resolve(
        target, hub_infos, to_hub=False, config=config, complete=complete, left=to_hub.left
    )  # fmt: skip
    return Resolution(
        targets={
            name: _compose_through_hub(mapped, to_hub.targets, infos)
            for name, mapped in from_hub.targets.items()
        },
        dropped={**to_hub.dropped, **_by_source_key(from_hub.dropped, to_hub.targets)},
        unmapped=(*to_hub.unmapped, *_source_keys(from_hub.unmapped, to_hub.targets)),
        tied={**from_hub.tied},
        used={**to_hub.used, **from_hub.used},
    )


def _resolve_to_hub(
    infos: Mapping[str, TensorInfo],
    source: NamingScheme | None,
    config: Mapping[str, object] | None,
    complete: bool,
    left: Collection[str],
) -> Resolution:
    if source is not None:
        return resolve(source, infos, to_hub=True, config=config, complete=complete, left=left)
    targets = {name: MappedTensor(name, info, name) for name, info in infos.items()}
    return Resolution(targets, {}, ())


def _source_keys(names: Sequence[str], hub_tensors: Mapping[str, MappedTensor]) -> list[str]:
    """Return the source keys that the given hub names are made of."""
    return list(dict.fromkeys(key for name in names for key in hub_tensors[name].sources))


def _by_source_key(
    dropped: Mapping[str, str], hub_tensors: Mapping[str, MappedTensor]
) -> dict[str, str]:
    return {key: why for name, why in dropped.items() for key in hub_tensors[name].sources}


def _compose_through_hub(
    mapped: MappedTensor, hub_tensors: Mapping[str, MappedTensor], infos: Mapping[str, TensorInfo]
) -> MappedTensor:
    """Return a target that is made of hub tensors as one made of the first scheme's tensors."""
    if mapped.source is not None:
        hub_tensor = hub_tensors[mapped.source]
        if mapped.name == hub_tensor.name and not mapped.ops:
            return hub_tensor
        return hub_tensor._replace(
            name=mapped.name, info=mapped.info, ops=(*hub_tensor.ops, *mapped.ops)
        )
    if all(
        hub_tensors[name].source is not None and not hub_tensors[name].ops
        for name in mapped.sources
    ):
        names = {name: hub_tensors[name].source for name in mapped.sources}
        if all(name == source for name, source in names.items()):
            return mapped
    pieces: list[Piece] = []
    for name in mapped.sources:
        hub_pieces = [piece for piece in mapped.pieces if piece.source == name]
        pieces += compose(pieces_of(hub_tensors[name], infos), hub_pieces)
    whole = len(pieces) == 1 and is_whole(pieces[0], infos[pieces[0].source], mapped.info)
    return mapped._replace(
        source=pieces[0].source if whole else None,
        pieces=() if whole else tuple(pieces),
        ops=(*_common_ops(mapped, hub_tensors), *mapped.ops),
    )


def _common_ops(
    mapped: MappedTensor, hub_tensors: Mapping[str, MappedTensor]
) -> tuple[tuple[str, bool], ...]:
    ops = {hub_tensors[name].ops for name in mapped.sources}
    if len(ops) > 1:
        raise PlanError(
            "CKM613",
            f"{mapped.name}: would be made of tensors with different value operations:"
            f" {', '.join(mapped.sources)}",
            "convert to the hub's names first with --names hf, then convert the result",
        )
    return next(iter(ops), ())


def pieces_of(mapped: MappedTensor, infos: Mapping[str, TensorInfo]) -> Sequence[Piece]:
    """Return the pieces of a target; one that is only renamed is a single piece."""
    if mapped.source is None:
        return mapped.pieces
    whole = StridedBox.of_box(Box.whole(infos[mapped.source].shape))
    return (Piece(mapped.source, whole, whole),)
