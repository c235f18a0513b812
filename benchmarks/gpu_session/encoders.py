"""Run an encoding's encoder and decoder over one weight, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

NAME = "model.layers.0.mlp.up_proj.weight"


def encodings(info: Any) -> dict[str, Any]:
    """Return the encoding that each registered scheme would use for this weight, by scheme name.

    One that takes values of another dtype, to which a conversion casts the weight first, is left out.
    """
    from ckptmap import registry
    from ckptmap.protocols.encodings import TakesDtype

    found = {}
    for scheme in registry.schemes():
        encoding = scheme.target(NAME, info) if scheme.suffix else None
        if encoding is None or encoding.name == "dense":
            continue
        if not isinstance(encoding, TakesDtype) or encoding.takes == info.dtype:
            found[scheme.name] = encoding
    return found


def feeds(encoder: Any, numel: int, feed: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of runs that the encoder takes, of about `feed` elements each; None: as many as
    conversions feed a device."""
    from ckptmap.quantization.blockwise.chunks import DEVICE_NUMEL

    step = max(1, (feed or DEVICE_NUMEL) // encoder.step) * encoder.step
    for at in range(0, numel, step):
        yield at, min(at + step, numel)


def looking(encoder: Any) -> Any:
    """Return the method that an encoder sees all values by before the first `feed`; None: it has none."""
    from ckptmap.protocols import LooksFirst

    return encoder.look if isinstance(encoder, LooksFirst) else None


def encode(
    encoding: Any,
    info: Any,
    w: Any,
    feed: int | None = None,
    forbid: Callable[[bool], None] = lambda forbidden: None,
) -> dict[str, Any]:
    """Return the encoded values of each part, flat, on the CPU.

    `forbid(True)` is called before all but the first look and the first feed, which make tables: from
    then on waiting for the device is forbidden until `forbid(False)`.
    """
    import torch

    encoder, flat = encoding.encoder(info, str(w.device)), w.reshape(-1)
    runs, look, writes = list(feeds(encoder, flat.numel(), feed)), looking(encoder), []
    try:
        for start, end in runs if look else ():
            forbid(start > 0)
            look(flat[start:end])
        for start, end in runs:
            forbid(start > 0)
            writes += encoder.feed(start, flat[start:end])
    finally:
        forbid(False)
    writes += encoder.finish()
    parts: dict[str, list[Any]] = {}
    for write in writes:
        parts.setdefault(write.part, []).append(write.values.cpu().reshape(-1))
    return {name: torch.cat(values) for name, values in parts.items()}


def encode_only(encoding: Any, info: Any, w: Any) -> None:
    """Look at and `feed` the whole weight, without `finish`, which copies statistics to the CPU."""
    encoder, flat = encoding.encoder(info, str(w.device)), w.view(-1)
    runs, look = list(feeds(encoder, flat.numel())), looking(encoder)
    for start, end in runs if look else ():
        look(flat[start:end])
    for start, end in runs:
        list(encoder.feed(start, flat[start:end]))


def placed(encoding: Any, info: Any, parts: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the parts on a device in their shapes, cut as a decoder of the whole weight wants them."""
    from ckptmap.tensors import Box

    whole, cut = Box.whole(info.shape), {}
    here = getattr(encoding, "host_parts", ())
    for name, part in encoding.parts(info).items():
        values = parts[name].to("cpu" if name in here else device).view(part.shape)
        box = encoding.part_box(info, name, whole)
        for dim, (offset, count) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            values = values.narrow(dim, offset, count)
        cut[name] = values
    return cut


def decode(encoding: Any, info: Any, given: Mapping[str, Any], device: str) -> Any:
    """Return the weight on a device, decoded there from parts that `placed` gave."""
    import torch

    from ckptmap.tensors import Box

    out = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device)
    encoding.decode(info, given, Box.whole(info.shape), out)
    return out


@contextmanager
def no_waiting(device: str) -> Iterator[Callable[[bool], None]]:
    """Give a function that forbids waiting for the device, and allows it again."""
    import torch

    if not device.startswith("cuda"):
        yield lambda forbidden: None
        return
    try:
        yield lambda forbidden: torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
