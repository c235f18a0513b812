"""Experts beside compressed-tensors' codes: transformers stacks them, and decodes them while it does.

It decodes all experts as one group of the config says, so that experts of two forms are not found. Source:
transformers 5.23, integrations/compressed_tensors.py (`get_experts_scheme`, `CompressedTensorsDequantize.convert`).
Programs that read experts one by one, such as vLLM, do not need this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from ckptmap.errors import PlanError
from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import Encoded
from ckptmap.quantization.linear_weights import is_expert
from ckptmap.tensors import TensorInfo

_PACKED = "pack-quantized"


@runtime_checkable
class StacksExperts(Protocol):
    """A scheme whose weights transformers decodes while it stacks the experts of a layer."""

    def misread(self, fqn: str, encoding: Encoding, info: TensorInfo) -> str:
        """Return how transformers misreads the weight there; "" where it does not, or it is no expert."""


def require_experts_found(encodings: Mapping[str, Encoded], settings: object) -> None:
    """Raise PlanError CKM203 where the group that transformers reads experts by is of other codes."""
    group = _group_of_experts(settings)
    form = str(group.get("format"))
    of_form: dict[str, str] = {}
    for fqn, (encoding, info) in encodings.items():
        if len(info.shape) == 2 and is_expert(fqn):
            of_form.setdefault(encoding.name, fqn)
    if "dense" in of_form and form.endswith(_PACKED):
        raise PlanError(
            "CKM203",
            f"{of_form['dense']}: cannot stay dense beside {form}: transformers stacks the experts of a layer,"
            " and finds only those that are packed, too",
            "choose --to hf-ct-int8, hf-ct-mxfp4 or hf-ct-fp8; or, for programs that read experts one by"
            " one, name all weights to encode: --encode '*_proj.weight' --encode '*.experts.*.weight'",
        )
    coded = sorted(of_form.keys() - {"dense"})
    if len(coded) > 1:
        raise PlanError(
            "CKM203",
            f"{of_form[coded[1]]}: cannot be {coded[1]} beside {of_form[coded[0]]} in {coded[0]}: transformers"
            " stacks the experts of a layer, and decodes all by one group of config.json",
            f"decode them all with --to hf-bf16, and from that choose one form: --to hf-{coded[0]}",
        )
    _require_one_group(settings)


def _require_one_group(settings: object) -> None:
    """Raise PlanError CKM203 where groups of columns differ from expert to expert: one group is of all of them."""
    having = [
        names[0]
        for group in _groups(settings)
        if group["format"] == _PACKED
        and (names := [name for name in group["targets"] if is_expert(name)])
    ]
    if len(having) > 1:
        raise PlanError(
            "CKM203",
            f"{having[1]}: cannot have scales for other columns than {having[0]}: transformers stacks the experts"
            " of a layer, and decodes all by one group of config.json",
            "choose one scale a row, --to hf-ct-int8, or blocks that fit both, --to hf-ct-mxfp4",
        )


def _groups(settings: object) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    return list(groups.values()) if isinstance(groups, Mapping) else []


def _group_of_experts(settings: object) -> Mapping[str, object]:
    """Return the group by which transformers decodes experts; empty where the config has none."""
    found = _groups(settings)
    for group in found:
        if any(target.startswith("re:") and "experts" in target for target in group["targets"]):
            return dict(group)
    return dict(found[0]) if found else {}


def misread_experts(
    encodings: Mapping[str, Encoded], misread: Callable[[str, Encoding, TensorInfo], str]
) -> list[str]:
    """Return a note for each form whose experts transformers decodes to other values, or not at all."""
    first: dict[str, tuple[str, str]] = {}
    for fqn, (encoding, info) in encodings.items():
        if is_expert(fqn) and (how := misread(fqn, encoding, info)):
            first.setdefault(encoding.name, (fqn, how))
    return [
        f"{fqn} and other experts: transformers 5.23 stacks them, and decodes {name} {how}, to other"
        " values or not at all; for programs that read experts one by one"
        for name, (fqn, how) in sorted(first.items())
    ]
