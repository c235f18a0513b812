"""Which encodings a live model can hold, by what wraps it: a table of facts, and what they rest on.

A setup says what wraps the model that it is for (`Setup.live`), a scheme which row it is (`HeldLive`).
Found with torch 2.13, torchao 0.18 and bitsandbytes 0.50 on the CPU under gloo. A pair that nothing
can hold is refused when a conversion is planned, with the nearest that is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.errors import PlanError
from ckptmap.protocols import Setup


@runtime_checkable
class HeldLive(Protocol):
    """A scheme whose tensors live models may hold; `live` is one word for those held alike."""

    name: str
    live: str


@dataclass(frozen=True)
class LiveSupport:
    """Whether models wrapped so hold weights encoded so.

    how      what makes it work, or why nothing does
    nearest  suffix of `--to` that is held in its place; only where `how` says why it is not
    needs    (library, least version) that a live model of it needs
    """

    how: str
    nearest: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        return not self.nearest


TORCHAO = (("torchao", "0.15"),)
BITSANDBYTES = (("bitsandbytes", "0.45"),)

_NF4 = "torchao's NF4Tensor, frozen, in linear layers"
_INT8 = "torchao's Int8Tensor, frozen, in linear layers"
_FLOAT8 = "decoded: ckptmap.load builds no live float8"
_BNB = "bitsandbytes' own loader; ckptmap.load decodes it"
TABLE: dict[tuple[str, str], LiveSupport] = {
    ("plain", "nf4"): LiveSupport(_NF4, needs=TORCHAO),
    ("compiled", "nf4"): LiveSupport(_NF4, needs=TORCHAO),
    ("DDP", "nf4"): LiveSupport(
        f"{_NF4}; load after wrapping: DDP's own broadcast would quantize them anew", needs=TORCHAO
    ),
    ("FSDP1", "nf4"): LiveSupport(
        "in ignored_states only, whole on every rank: FSDP1 cannot flatten it", needs=TORCHAO
    ),
    ("FSDP2", "nf4"): LiveSupport(
        f"{_NF4}, rows that divide by the ranks; others are decoded", needs=TORCHAO
    ),
    ("plain", "bitsandbytes 4-bit"): LiveSupport(_BNB, needs=BITSANDBYTES),
    ("compiled", "bitsandbytes 4-bit"): LiveSupport(_BNB, needs=BITSANDBYTES),
    ("DDP", "bitsandbytes 4-bit"): LiveSupport(_BNB, needs=BITSANDBYTES),
    ("FSDP1", "bitsandbytes 4-bit"): LiveSupport(
        "as bitsandbytes cuts it: payload in the dtype of the others, scales whole",
        needs=BITSANDBYTES,
    ),
    ("FSDP2", "bitsandbytes 4-bit"): LiveSupport(
        "as bitsandbytes cuts it, scales whole; its state dict loses them (--base restores)",
        needs=BITSANDBYTES,
    ),
    ("plain", "int8"): LiveSupport(_INT8, needs=TORCHAO),
    ("compiled", "int8"): LiveSupport(_INT8, needs=TORCHAO),
    ("DDP", "int8"): LiveSupport(
        f"{_INT8}; load after wrapping: DDP's first broadcast has no view of it", needs=TORCHAO
    ),
    ("FSDP1", "int8"): LiveSupport(
        'FSDP1 flattens parameters, and can neither flatten integers ("Cannot flatten integer dtype'
        " tensors\") nor torchao's subclasses",
        nearest=("fsdp2-int8", "fsdp1-bf16"),
    ),
    ("FSDP2", "int8"): LiveSupport(
        f"{_INT8}, rows that divide by the ranks; others are decoded", needs=TORCHAO
    ),
    ("plain", "float8"): LiveSupport(
        "torchao's or transformers' own loader; ckptmap.load decodes it"
    ),
    ("compiled", "float8"): LiveSupport(_FLOAT8),
    ("DDP", "float8"): LiveSupport(_FLOAT8),
    ("FSDP1", "float8"): LiveSupport(
        "FSDP1 flattens parameters of one dtype: codes in float8 and their scales are two",
        nearest=("fsdp2-fp8", "fsdp1-bf16"),
    ),
    ("FSDP2", "float8"): LiveSupport(_FLOAT8),
}


def holds(setup: str, encoding: str) -> LiveSupport | None:
    """None: nothing is known of such a pair, or the encoding is dense."""
    return next((_held(one, encoding) for one in registry.setups() if one.name == setup), None)


def _held(setup: Setup, encoding: str) -> LiveSupport | None:
    if encoding == "dense":  # a look at a protocol's members costs as much as all else of a tensor
        return None
    scheme = next((one for one in registry.schemes() if one.name == encoding), None)
    return TABLE.get((setup.live, scheme.live)) if isinstance(scheme, HeldLive) else None


def refuse_unheld(fqn: str, setup: Setup, encoding: str) -> None:
    """Raises PlanError CKM317 where no live model of that setup can hold the tensor."""
    found = _held(setup, encoding)
    if found is not None and not found.ok:
        nearest = " or ".join(f"--to {name}" for name in found.nearest)
        raise PlanError(
            "CKM317",
            f"{fqn}: {encoding} in a model of {setup.name}: {found.how}",
            f"nearest: {nearest}",
        )


def rows() -> Iterator[tuple[str, str, LiveSupport]]:
    """(setup, encoding, what is known), in the order of the registry."""
    for setup in registry.setups():
        for scheme in registry.schemes():
            found = _held(setup, scheme.name)
            if found is not None:
                yield setup.name, scheme.name, found
