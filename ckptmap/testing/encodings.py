"""Check a quantization scheme: the parts it announces, the parts it stores, and the values that come back."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.core.json_text import parse_json
from ckptmap.operations.convert import convert
from ckptmap.protocols import Encoder, Encoding, Group, LooksFirst, Refusal, Scheme
from ckptmap.protocols.encodings import TakesDtype
from ckptmap.protocols.offers import offers
from ckptmap.quantization.blockwise.dequantize import window
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor, info_of
from ckptmap.tensors import ITEMSIZE, Box, Opaque, TensorInfo
from ckptmap.testing.base import expect, registered, run_all
from ckptmap.testing.codes import check_codes
from ckptmap.testing.parts import Assembly, Parts, on_disk, stored
from ckptmap.testing.samples import random_box, same, save

if TYPE_CHECKING:
    import torch

SHAPES = ((), (1,), (0, 4), (7,), (64,), (128,), (64, 64), (32, 96), (3, 5, 7), (16, 1024))
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64")
MAX_ERROR = 0.5
"""Largest relative rms error of decoded normal values: even one bit a value does better."""
BOXES = 6


def check_scheme(scheme: Scheme) -> None:
    """Raise AssertionError where the scheme, or an encoding that it gives, breaks its protocol.

        from ckptmap.testing import check_scheme
        check_scheme(MyScheme())

    Tensors of many shapes and dtypes, where the scheme does not refuse them, are encoded at once and in
    pieces, decoded whole and by boxes, and recognized again from their parts and record.
    """
    run_all(SchemeKit(scheme))


class SchemeKit:
    """The checks of `check_scheme` one by one, for a test each: `getattr(SchemeKit(s), name)()`."""

    CHECKS = ("takes", "describes", "pieces", "values", "boxes", "empty_boxes", "codes", "recognised",
              "strangers", "untouched")  # fmt: skip

    def __init__(self, scheme: Scheme, reader: Scheme | None = None) -> None:
        """Take a target, and the scheme that finds its tensors again where that is another one."""
        self.scheme = scheme
        self.reader = reader or scheme

    @cached_property
    def attempts(self) -> list[_Attempt]:
        """One try for each shape and dtype that the scheme encodes; `TakesDtype` casts others to its own."""
        infos = (TensorInfo(shape, dtype) for dtype in DTYPES for shape in SHAPES)
        pairs = ((_encoding(self.scheme, info), info) for info in infos)
        tried = dict.fromkeys((enc, _as_taken(enc, info)) for enc, info in pairs if enc)
        return [_Attempt(self.scheme, encoding, info) for encoding, info in tried]

    def takes(self) -> None:
        """Check that a target takes some tensors, and refuses the others with a reason."""
        name, suffix = self.scheme.name, self.scheme.suffix
        expect(name, "a scheme needs a name")
        expect(self.attempts or not suffix, f"{name}: is a target, but refuses every tensor")

    def describes(self) -> None:
        """Check that the encoder writes the parts that `parts()` announces: names, shapes, dtypes, each element once."""
        for attempt in self.attempts:
            for name, part in attempt.parts.items():
                info = info_of(part)
                expect(
                    info == attempt.expected_parts[name],
                    f"{attempt.title}: part {name!r} is {info}",
                )

    def pieces(self) -> None:
        """Check that the size of the pieces in which values are fed does not change a bit."""
        for attempt in self.attempts:
            attempt.pieces_make_no_difference()

    def values(self) -> None:
        """Check that decoded values equal torch's cast, or are near it where the encoding is lossy, each time."""
        for attempt in self.attempts:
            attempt.values_survive()

    def boxes(self) -> None:
        """Check that a decoded box equals that box of the whole, given only the parts' boxes that `part_box` names."""
        for attempt in self.attempts:
            attempt.boxes(empty=False)

    def empty_boxes(self) -> None:
        """Check that empty boxes can be decoded like any other, at the end of the tensor too."""
        for attempt in self.attempts:
            attempt.boxes(empty=True)

    def codes(self) -> None:
        """Check that codes that another encoding could keep are as announced, and the encoding takes its own."""
        for attempt in self.attempts:
            check_codes(attempt.title, attempt.encoding, attempt.info, attempt.parts)

    def recognised(self) -> None:
        """Check that `group()` finds the tensor again among others, by its record after a trip through JSON."""
        for attempt in self.attempts:
            attempt.recognised(self.reader)

    def strangers(self) -> None:
        """Check that the scheme leaves tensors and objects of others alone."""
        name, dense = self.scheme.name, TensorInfo((4, 4), "float32")
        plain = {key: stored(dense) for key in ("a.weight", "b.bias")}
        expect(self.scheme.group(plain, {}) == [], f"{name}: groups plain tensors")
        expect(self.scheme.group({}, {}) == [], f"{name}: groups nothing")
        stranger = Opaque("kit.nowhere", "Stranger", (), {}, dense)
        expect(self.scheme.adopt("w", stranger) is None, f"{name}: adopts an unknown class")

    def untouched(self) -> None:
        """Check that a tensor for which `target()` is None passes through a conversion bit for bit."""
        import torch

        if not self.scheme.suffix:
            return
        names = ("layers.0.fc.weight", "norm.weight", "ids", "mask", "embed_tokens.weight", "s")
        dtypes = ("float32", "bfloat16", "int64", "bool", "float16", "float64")
        maker = torch.Generator().manual_seed(3)
        tensors = {
            name: torch.randn(64, 64, generator=maker).to(getattr(torch, dtype))
            for name, dtype in zip(names, dtypes, strict=True)
        }
        with tempfile.TemporaryDirectory() as folder, registered(self.scheme):
            source, out = save(Path(folder) / "source.pt", tensors, {}), Path(folder) / "out.pt"
            convert(source, out, f"full-{self.scheme.suffix}")
            with open_checkpoint(out) as ckpt:
                for name, tensor in tensors.items():
                    left = self.scheme.target(name, info_of(tensor)) is None
                    good = not left or same(ckpt[name].read(), tensor)
                    expect(good, f"{self.scheme.name}: {name}: target() is None, yet it changes")


def _encoding(scheme: Scheme, info: TensorInfo) -> Encoding | None:
    """Return the encoding that `encoding()` forces, None if it refuses; it must agree with `target()`."""
    forced = scheme.encoding(info)
    target = scheme.target("layers.0.fc.weight", info)
    title = f"{scheme.name}: {info}"
    if isinstance(forced, Refusal):
        expect(forced.reason.strip(), f"{title}: refused without a reason")
        expect(target is None, f"{title}: refused by encoding(), but target() takes it")
        return None
    expect(target is None or target == forced, f"{title}: target() {target}, encoding() {forced}")
    expect(scheme.encoding(info) == forced, f"{title}: another encoding when asked again")
    expect(
        hash(forced) == hash(scheme.encoding(info)),
        f"{title}: {forced} is not a frozen value with a stable hash",
    )
    return forced


def _as_taken(encoding: Encoding, info: TensorInfo) -> TensorInfo:
    """Return the info of the values as the encoding is given them: `TakesDtype`."""
    return TensorInfo(info.shape, encoding.takes) if offers(encoding, TakesDtype) else info


@dataclass(frozen=True)
class _Attempt:
    """One encoding applied to one logical tensor of random values."""

    scheme: Scheme
    encoding: Encoding
    info: TensorInfo

    @property
    def title(self) -> str:
        return f"{self.scheme.name}: {self.info}"

    @cached_property
    def values(self) -> torch.Tensor:
        import torch

        maker = torch.Generator().manual_seed(self.info.numel)
        values = torch.randn(self.info.shape, generator=maker, dtype=torch.float32)
        return values.mul_(3).to(getattr(torch, self.info.dtype))

    @cached_property
    def parts(self) -> Parts:
        """The parts, encoded from a single feed."""
        return self.encoded([self.info.numel])

    @cached_property
    def whole(self) -> torch.Tensor:
        """All values, encoded and decoded."""
        return self.decoded(Box.whole(self.info.shape))

    # ------------------------------------------------------------------ what it says

    @cached_property
    def expected_parts(self) -> Mapping[str, TensorInfo]:
        parts = self.encoding.parts(self.info)
        expect(
            not isinstance(parts, Refusal), f"{self.title}: encoding() gives it, parts() refuses"
        )
        assert not isinstance(parts, Refusal)
        expect(parts, f"{self.title}: no parts")
        for name, part in parts.items():
            good = part.dtype in ITEMSIZE and not name.startswith(".") and not name.endswith(".")
            expect(good, f"{self.title}: part {name!r} of {part}")
        expect(
            self.encoding.parts(self.info) == parts, f"{self.title}: other parts when asked again"
        )
        return parts

    # ------------------------------------------------------------------ encoding

    def encoded(self, counts: Sequence[int]) -> Parts:
        """Return the parts, encoded from feeds of `counts` elements in row-major order."""
        encoder = self.encoding.encoder(self.info, "cpu")
        expect(encoder.step >= 1, f"{self.title}: a step of {encoder.step}")
        feeds, at = [], 0
        for count in counts:
            feeds.append((at, count))
            at += count
        return self._collected(encoder, feeds)

    def _collected(self, encoder: Encoder, feeds: Iterable[tuple[int, int]]) -> Parts:
        flat = self.values.reshape(-1)
        if isinstance(encoder, LooksFirst):
            encoder.look(flat.clone())
        assembly = Assembly(self.title, self.expected_parts, in_order=not encoder.splittable)
        for offset, count in feeds:
            given = flat[offset : offset + count].clone()
            for write in encoder.feed(offset, given):
                assembly.take(write)
        for write in encoder.finish():
            assembly.take(write)
        return assembly.parts()

    def pieces_make_no_difference(self) -> None:
        """Feed multiples of the step; for a splittable encoder, also in reverse order."""
        encoder = self.encoding.encoder(self.info, "cpu")
        numel, step = self.info.numel, encoder.step
        for size in (step, 3 * step):
            if numel > 64 * size:
                size = -(-numel // 64 // step) * step
            counts = [min(size, numel - at) for at in range(0, numel, size)]
            parts = self.encoded(counts)
            self._equal(parts, f"fed {size} elements at a time")
        if encoder.splittable and numel:
            feeds = [(at, min(step, numel - at)) for at in range(0, numel, step)]
            feeds = feeds if len(feeds) < 64 else [(0, step), (step, numel - step)]
            parts = self._collected(encoder, reversed(feeds))
            self._equal(parts, "fed backwards")

    def _equal(self, parts_again: Parts, condition: str) -> None:
        for name, part in self.parts.items():
            expect(
                same(part, parts_again[name]),
                f"{self.title}: part {name!r} differs when {condition}",
            )

    # ------------------------------------------------------------------ decoding

    def decoded(self, box: Box) -> torch.Tensor:
        import torch

        given = {}
        for name, part in self.parts.items():
            where = self.encoding.part_box(self.info, name, box)
            expect(where is not None, f"{self.title}: part {name!r} cannot be cut at {box}")
            assert where is not None
            self._check_inside(name, where, info_of(part))
            given[name] = window(part, where).contiguous()
        out = torch.full(box.sizes, 1, dtype=getattr(torch, self.info.dtype))
        self.encoding.decode(self.info, given, box, out)
        return out

    def _check_inside(self, name: str, where: Box, part: TensorInfo) -> None:
        good = len(where.sizes) == len(part.shape) and all(
            o >= 0 and n >= 0 and o + n <= limit
            for o, n, limit in zip(where.offsets, where.sizes, part.shape, strict=True)
        )
        expect(good, f"{self.title}: part_box of {name!r} gives {where}, outside {part}")

    def values_survive(self) -> None:
        import torch

        values, parts, whole = self.values, self.parts, self.whole
        decoded_again = self.decoded(Box.whole(self.info.shape))
        expect(same(whole, decoded_again), f"{self.title}: decodes differently the second time")
        if list(parts) == [""] and parts[""].shape == values.shape:
            expected = values.to(parts[""].dtype)
            expect(same(parts[""], expected), f"{self.title}: the part is not values.to(dtype)")
            expect(same(whole, expected.to(values.dtype)), f"{self.title}: other values come back")
        elif values.numel():
            wide = torch.float64
            difference = (whole.to(wide) - values.to(wide)).square().mean().sqrt()
            error = float(difference / values.to(wide).square().mean().sqrt())
            expect(error <= MAX_ERROR, f"{self.title}: a relative rms error of {error:.3f}")

    def boxes(self, empty: bool) -> None:
        draw = random.Random(self.info.numel)
        drawn = [random_box(self.info.shape, draw) for _ in range(BOXES)]
        for box in (box for box in drawn if bool(box.numel) != empty):
            cuts = [self.encoding.part_box(self.info, name, box) for name in self.parts]
            if None in cuts:
                continue  # None: the tensor must be decoded whole, which is allowed and slower
            same_values = same(self.decoded(box), window(self.whole, box))
            expect(same_values, f"{self.title}: decoded at {box}, other values than the whole has")

    # ------------------------------------------------------------------ recognised again

    def recognised(self, reader: Scheme) -> None:
        record = self.encoding.record(self.info)
        if record is None and list(self.parts) == [""]:
            return  # stored as a plain tensor: nothing to recognize
        records = parse_json(json.dumps({"a.w": record})) if record is not None else {}
        with tempfile.TemporaryDirectory() as folder:
            lying = on_disk(Path(folder) / "parts", self.encoding, self.parts, "a.w")
            other = {"a.bias": stored(TensorInfo((4,), "float32"))}
            groups = reader.group({**other, **lying}, records)
            expect(len(groups) == 1, f"{self.title}: stored once, group() finds {len(groups)}")
            group, consumed = groups[0]
            self._check_group(group, consumed, lying)
            files = Files()
            read = LazyTensor("a.w", group, files).read()
            files.close()
            expect(same(read, self.whole), f"{self.title}: other values when read again")

    def _check_group(self, group: Group, used: Sequence[str], stored: Mapping[str, object]) -> None:
        expect(group.fqn == "a.w", f"{self.title}: found again as {group.fqn!r}")
        expect(group.info == self.info, f"{self.title}: found again as {group.info}")
        expect(group.encoding == self.encoding, f"{self.title}: found again as {group.encoding}")
        expect(
            sorted(used) == sorted(stored),
            f"{self.title}: consumes {sorted(used)}, expected its parts {sorted(stored)}",
        )
