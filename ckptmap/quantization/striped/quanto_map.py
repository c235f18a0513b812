"""Compare quanto's map of modules, `quanto_qmap.json`, with the codes that lie beside it.

    {"model.layers.0.mlp.up_proj": {"weights": "qint4", "activations": "none"}, ...}

quanto makes modules by this map and loads codes into them. A map that states another kind than the codes have is of
another save. Source: `QuantizedTransformersModel.from_pretrained` and `quantization_map` (optimum-quanto 0.2.7).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptmap.core.short_repr import short
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.group_checks import CONTRADICTORY, file_of, malformed
from ckptmap.quantization.blockwise.read_config import MAX_NBYTES
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import StoredTensor

MAP = "quanto_qmap.json"


def map_beside(stored: StoredTensor, mounts: Mounts) -> Mapping[str, object]:
    """Return module -> what the map beside a tensor's file states of it; empty where there is no map."""
    try:
        found = read_json(Path(file_of(stored)).parent / MAP, mounts, max_nbytes=MAX_NBYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def require_mapped_kind(fqn: str, kind: str, stated: Mapping[str, object]) -> None:
    """Raise SourceError CKM115 where the map states the module of a weight with codes of another kind.

    kind  quanto's name of the codes: qint4, qint8, qfloat8_e4m3fn
    """
    module = fqn.removesuffix(".weight")
    if module not in stated:
        return
    entry = stated[module]
    weights = entry.get("weights") if isinstance(entry, Mapping) else entry
    if weights != kind:
        shown = f"{MAP} states weights {short(weights)} for {module}"
        raise malformed(fqn, f"{shown}, and its codes are {kind}", CONTRADICTORY)
