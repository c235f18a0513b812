"""Which encodings the weights of a live model can have, by what wraps the model: a table of facts.

A setup says what wraps its model (`Setup.live`), a scheme which row of the table it is (`HeldLive`).
The facts were established with torch 2.13, torchao 0.18 and bitsandbytes 0.50 on the CPU under gloo. A
pair that no model can hold is refused when a conversion is planned; the error names the nearest that
one can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.errors import PlanError
from ckptmap.protocols import Scheme, Setup
from ckptmap.protocols.offers import offers


@runtime_checkable
class HeldLive(Protocol):
    """A scheme whose tensors live models may hold; schemes that are held alike have one `live`."""

    name: str
    live: str


@runtime_checkable
class ReadsMore(Protocol):
    """A scheme that reads encodings of several names: blocks of every type of ggml, codes of 2 and of 4 bits."""

    more_names: Collection[str]


@dataclass(frozen=True)
class LiveSupport:
    """Whether a wrapped model holds weights of an encoding.

    how      what makes it work, or why nothing does
    nearest  setups for `--to` that work in its place; empty where this pair works
    needs    (library, minimum version) that a live model of it needs
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
_MICROSCALED = "decoded: ckptmap.load builds no live microscaled weights"
_GGUF = "decoded: ckptmap.load builds no live blocks of ggml"
_STRIPED = "decoded: ckptmap.load builds no live weights of HQQ or quanto"
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
    ("plain", "microscaled"): LiveSupport("its library's own loader; ckptmap.load decodes it"),
    ("compiled", "microscaled"): LiveSupport(_MICROSCALED),
    ("DDP", "microscaled"): LiveSupport(_MICROSCALED),
    ("FSDP1", "microscaled"): LiveSupport(
        "FSDP1 flattens parameters of one dtype: codes and their scales are bytes",
        nearest=("fsdp1-bf16", "fsdp2-bf16"),
    ),
    ("FSDP2", "microscaled"): LiveSupport(_MICROSCALED),
    ("plain", "gguf"): LiveSupport("llama.cpp runs them; ckptmap.load decodes them"),
    ("compiled", "gguf"): LiveSupport(_GGUF),
    ("DDP", "gguf"): LiveSupport(_GGUF),
    ("FSDP1", "gguf"): LiveSupport(
        "FSDP1 flattens parameters of one dtype: blocks are bytes",
        nearest=("fsdp1-bf16", "fsdp2-bf16"),
    ),
    ("FSDP2", "gguf"): LiveSupport(_GGUF),
    ("plain", "striped"): LiveSupport("its library's own loader; ckptmap.load decodes it"),
    ("compiled", "striped"): LiveSupport(_STRIPED),
    ("DDP", "striped"): LiveSupport(_STRIPED),
    ("FSDP1", "striped"): LiveSupport(
        "FSDP1 flattens parameters of one dtype: codes and their scales are bytes",
        nearest=("fsdp1-bf16", "fsdp2-bf16"),
    ),
    ("FSDP2", "striped"): LiveSupport(_STRIPED),
}


def scheme_of(encoding: str) -> Scheme | None:
    """Return the scheme that reads an encoding of this name; None: no scheme of its own does."""
    schemes = registry.schemes()
    named = [one for one in schemes if one.name == encoding]
    return next(iter(named or [one for one in schemes if encoding in _more_names(one)]), None)


def _more_names(scheme: Scheme) -> Collection[str]:
    return scheme.more_names if offers(scheme, ReadsMore) else ()


def _support(setup: Setup, encoding: str) -> LiveSupport | None:
    """Return the table's row for the pair; None: it has none, or the encoding is dense."""
    if encoding == "dense":  # isinstance with a protocol costs as much as planning a tensor
        return None
    scheme = scheme_of(encoding)
    if scheme is None or not offers(scheme, HeldLive):
        return None
    refusal = None if setup.demands is None else setup.demands.refusal(encoding, "float32")
    if refusal is not None:
        return LiveSupport(refusal, nearest=(f"{setup.name}-bf16",))
    return TABLE.get((setup.live, scheme.live))


def require_holdable(fqn: str, setup: Setup, encoding: str) -> None:
    """Raise PlanError CKM317 where no live model of the setup can hold the tensor."""
    support = _support(setup, encoding)
    if support is not None and not support.ok:
        nearest = " or ".join(f"--to {name}" for name in support.nearest)
        raise PlanError(
            "CKM317",
            f"{fqn}: {encoding} in a model of {setup.name}: {support.how}",
            f"nearest: {nearest}",
        )


def rows() -> Iterator[tuple[str, str, LiveSupport]]:
    """Yield (setup, encoding, support) for every pair in the table, in the order of the registry."""
    for setup in registry.setups():
        for scheme in registry.schemes():
            support = _support(setup, scheme.name)
            if support is not None:
                yield setup.name, scheme.name, support
