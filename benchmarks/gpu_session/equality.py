"""Every encoder and decoder makes the CPU's bytes, and no loop of theirs waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.encoders import decode, encode, encodings, no_waiting, placed
from benchmarks.gpu_session.importable import ROOT, is_importable
from benchmarks.gpu_session.read_forms import compared, is_encoded, more_forms, random_parts
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import same_bits, weight

DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((256, 512), (130, 192), (257, 320), (1, 64), (67, 64), (7, 100), (3, 129), (5, 3, 128))
TINY_SHAPES = ((128, 128), (7, 100))
REFUSALS = ("RunError: ", "CoarseScales: ")
"""How the text of an error begins by which an encoder refuses values: both devices must refuse the same."""
FEEDS = 3
"""How many feeds a weight is encoded in, about; the last is shorter."""
GOLDEN = ("compressed", "gptq", "torchao")
"""Folders of tests/golden with checkpoints that other libraries quantized."""
FILES = {"torchao": "*.pt", "foreign": "*.*[sf]"}
"""Folders with single files of other libraries, and how these are named."""


def run(step: StepRun) -> None:
    """Compare encoders, decoders, codes of moments, and checkpoints of other libraries."""
    import torch

    torch.set_num_threads(1)  # for tensors this small threads cost more than they bring
    seen: dict[str, int] = {}
    for dtype in DTYPES:
        seen |= compare_encodings(step, dtype)
        check_waiting(step, dtype)
    compare_read_forms(step)
    left = compared(seen)
    step.result.check("every scheme of the registry is compared", not left, ", ".join(left))
    compare_moments(step)
    compare_golden(step)
    if is_importable("bitsandbytes"):
        compare_bitsandbytes(step)


# ------------------------------------------------------------------------------- values


def fillings(shape: tuple[int, ...], dtype: str, is_tiny: bool) -> Iterator[tuple[str, Any]]:
    """Yield a name and values for each kind of trouble that a block of a weight can have."""
    import torch

    maker, kind = torch.Generator().manual_seed(3), getattr(torch, dtype)
    normal = (torch.randn(shape, generator=maker) * 0.02).to(kind)
    yield "normal", normal
    zeros = normal.clone().view(-1)
    zeros[: zeros.numel() // 2] = 0
    zeros[1::7] = -0.0
    yield "zeros", zeros.view(shape)
    largest = torch.finfo(kind).max
    yield "saturated", torch.where(normal < 0, -largest, largest).to(kind)
    yield "NaN", with_values(normal, [float("nan")])
    yield "infinite", with_values(normal, [float("inf"), float("-inf")])
    if is_tiny:
        return
    yield "largest and least", with_values(normal, [largest, torch.finfo(kind).tiny / 8, -largest])
    yield "subnormal", (normal.sign() * torch.finfo(kind).tiny / 4).to(kind)
    yield "one size", torch.full(shape, 0.5, dtype=kind)
    heavy = torch.randn(shape, generator=maker) ** 5
    yield "heavy tails", heavy.to(kind)


def with_values(normal: Any, values: list[float]) -> Any:
    """Return a copy with these values spread over it."""
    import torch

    flat = normal.clone().view(-1)
    places = torch.linspace(0, flat.numel() - 1, len(values)).long()
    flat[places] = torch.tensor(values, dtype=torch.float64).to(flat.dtype)
    return flat.view(normal.shape)


# ------------------------------------------------------------------------------- comparisons


def compare_encodings(step: StepRun, dtype: str) -> dict[str, int]:
    """Check each encoding over shapes and fillings: one check for an encoding and a dtype.

    Return the number of cases by the name of the scheme.
    """
    from ckptmap.tensors import TensorInfo

    wrong: dict[str, list[str]] = {}
    cases: dict[str, int] = {}
    for shape in TINY_SHAPES if step.is_tiny else SHAPES:
        info = TensorInfo(shape, dtype)
        for filling, w in fillings(shape, dtype, step.is_tiny):
            for name, encoding in encodings(info).items():
                cases[name] = cases.get(name, 0) + 1
                said = difference(encoding, info, w, step.device)
                wrong.setdefault(name, []).extend(
                    f"{list(shape)} {filling}: {line}" for line in said
                )
    for name, lines in wrong.items():
        what = f"{name} of {dtype}: the CPU's bytes in {cases[name]} cases"
        step.result.check(what, not lines, "\n".join(lines[:6]))
    return cases


def compare_read_forms(step: StepRun) -> None:
    """Check each form that no named layer is encoded in: decoded from random bytes, and encoded where it can be."""
    wrong: dict[str, list[str]] = {}
    for name, encoding, info in more_forms():
        lines = wrong.setdefault(name, [])
        lines += decoded_apart(encoding, info, step.device)
        lines += waited_for(encoding, info, step.device)
        if is_encoded(encoding, info):
            for filling, w in fillings(info.shape, info.dtype, step.is_tiny):
                found = difference(encoding, info, w, step.device)
                lines += [f"{encoding!r:.80} {filling}: {line}" for line in found]
    for name, lines in wrong.items():
        step.result.check(
            f"{name}: read as on the CPU, and without a wait", not lines, "\n".join(lines[:6])
        )


def decoded_apart(encoding: Any, info: Any, device: str) -> list[str]:
    """Return a line where the values of random parts are not the CPU's; all NaN count as one."""
    parts = random_parts(encoding, info)
    found = []
    for where in ("cpu", device):
        given = placed(encoding, info, parts, where)
        values = outcome(lambda given=given, where=where: decode(encoding, info, given, where))
        if isinstance(values, str):
            return [f"{encoding!r:.80}: on {where}: {values}"]
        found.append(with_one_nan(values))
    said = apart("decoded", *found)
    return [f"{encoding!r:.80}: {said}"] if said else []


def waited_for(encoding: Any, info: Any, device: str) -> list[str]:
    """Return a line where a second decode waits for the device."""
    parts = placed(encoding, info, random_parts(encoding, info), device)
    decode(encoding, info, parts, device)  # makes tables
    with no_waiting(device) as forbid:
        forbid(True)
        said = outcome(lambda: decode(encoding, info, parts, device))
    return [f"{encoding!r:.80}: {said}"] if isinstance(said, str) else []


def with_one_nan(values: Any) -> Any:
    """Return the values on the CPU, all NaN alike: which NaN a cast makes depends on the vector unit of a CPU, too."""
    values = values.cpu()
    return values.masked_fill(values.isnan(), float("nan"))


def difference(encoding: Any, info: Any, w: Any, device: str) -> list[str]:
    """Return a line for each part, and for the decoded values, that is not the CPU's."""
    feed = info.numel // FEEDS
    here = outcome(lambda: encode(encoding, info, w, feed))
    there = outcome(lambda: encode(encoding, info, w.to(device), feed))
    if isinstance(here, str) or isinstance(there, str):
        refuses = isinstance(here, str) and here.startswith(REFUSALS)
        if here == there and refuses:
            return []
        return [f"expected {shown(here)}, got {shown(there)}"]
    found = [apart(part, values, there[part]) for part, values in here.items()]
    wanted = decode(encoding, info, placed(encoding, info, here, "cpu"), "cpu")
    got = outcome(lambda: decode(encoding, info, placed(encoding, info, here, device), device))
    if isinstance(got, str):
        return [*filter(None, found), f"decoding: {got}"]
    return [*filter(None, found), *filter(None, [apart("decoded", wanted, got)])]


def outcome(job: Callable[[], Any]) -> Any:
    """Return what the job returns, or the text of its error: both devices must refuse the same."""
    try:
        return job()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def shown(found: Any) -> str:
    return found if isinstance(found, str) else "values"


def apart(what: str, wanted: Any, found: Any) -> str:
    """Return where two tensors differ first and how often; empty: their bytes are the same."""
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return f"{what}: expected {wanted.dtype} {list(wanted.shape)}, got {found.dtype} {list(found.shape)}"  # fmt: skip
    if same_bits(wanted, found):
        return ""
    import torch

    rows = [t.detach().cpu().contiguous().reshape(-1) for t in (wanted, found)]
    one, two = (row.view(torch.uint8).view(row.numel(), -1) for row in rows)
    places = (one != two).any(1).nonzero().view(-1)
    first, kinds = int(places[0]), ""
    if rows[0].dtype.is_floating_point:
        nan = [bool(row.float()[places].isnan().all()) for row in rows]
        kinds = ", all NaN on both" if all(nan) else ""
    values = [f"{row[first].item()!r} ({bytes(part[first].tolist()).hex()})" for row, part in zip(rows, (one, two), strict=True)]  # fmt: skip
    return f"{what}: {places.numel()} of {rows[0].numel()} differ{kinds}, first at {first}: expected {values[0]}, got {values[1]}"


# ------------------------------------------------------------------------------- waiting


def check_waiting(step: StepRun, dtype: str) -> None:
    """Check that no feed after the first and no second decode waits for the device."""
    from ckptmap.tensors import TensorInfo

    side = 64 if step.is_tiny else 1024
    info, w = TensorInfo((side, side), dtype), weight(side, dtype)
    for name, encoding in encodings(info).items():
        with no_waiting(step.device) as forbid:
            said = outcome(
                lambda encoding=encoding: run_twice(encoding, info, w.to(step.device), forbid)
            )
        step.result.check(f"{name} of {dtype}: waits for nothing", said is None, said or "")


def run_twice(encoding: Any, info: Any, there: Any, forbid: Callable[[bool], None]) -> None:
    """Encode in several feeds and decode twice; only the first of each may wait for the device."""
    device = str(there.device)
    parts = encode(encoding, info, there, info.numel // 4, forbid)
    given = placed(encoding, info, parts, device)
    decode(encoding, info, given, device)  # makes tables
    forbid(True)
    decode(encoding, info, given, device)


# ------------------------------------------------------------------------------- moments


def compare_moments(step: StepRun) -> None:
    """Compare 8-bit, 4-bit and float8 moments of optimizers, with tables like torchao's."""
    import torch

    from ckptmap.optim import lowbit_codes

    maker = torch.Generator().manual_seed(4)
    values = torch.randn(1 << (13 if step.is_tiny else 20), generator=maker) * 1e-3
    values[:256] = 0
    for bits, block in ((8, 256), (4, 128), (0, 256)):
        qmap = ascending(1 << bits) if bits else None
        what = f"moments of {bits} bits" if bits else "moments in float8"
        with step.result.attempt(what):
            found = [
                moments(lowbit_codes, values, block, qmap, where) for where in ("cpu", step.device)
            ]
            lines = [apart(name, found[0][name], found[1][name]) for name in found[0]]
            step.result.check(
                f"{what}: the CPU's bytes", not any(lines), "\n".join(filter(None, lines))
            )


def ascending(count: int) -> Any:
    """Return a table of values from -1 to 1 with 0 among them, denser near 0."""
    import torch

    steps = torch.linspace(-1, 1, count + 1)[1:]
    return steps.abs().pow(3).mul(steps.sign())


def moments(codec: Any, values: Any, block: int, qmap: Any, device: str) -> dict[str, Any]:
    import torch

    packed = 2 if qmap is not None and qmap.numel() == 16 else 1
    kind = torch.float8_e4m3fn if qmap is None else torch.uint8
    codes = torch.zeros(values.numel() // packed, dtype=kind, device=device)
    scale = torch.zeros(values.numel() // block, device=device)
    table = None if qmap is None else qmap.to(device)
    assert codec.encode(values.to(device), block, table, codes, scale), (
        "the table has no thresholds"
    )
    decoded = codec.decode(codes, block, table, scale)
    return {"codes": codes.cpu(), "scale": scale.cpu(), "decoded": decoded.cpu()}


# ------------------------------------------------------------------------------- checkpoints


def compare_golden(step: StepRun) -> None:
    """Compare decoders with checkpoints that other libraries quantized: forms that are only read, too."""
    import ckptmap

    for path in golden(step.is_tiny):
        what = f"{path.relative_to(ROOT)}"
        try:
            checkpoint = ckptmap.open(path)
        except ckptmap.CkptmapError:  # kept to show that it is refused
            continue
        lines, count = [], 0
        with step.result.attempt(what), checkpoint as opened:
            for fqn, lazy in opened.items():
                if lazy.encoding == "dense":
                    continue
                count += 1
                here, there = (
                    outcome(lazy.read),
                    outcome(lambda lazy=lazy: lazy.read(device=step.device)),
                )
                if isinstance(here, str) or isinstance(there, str):
                    said = "" if here == there else f"expected {shown(here)}, got {shown(there)}"
                else:
                    said = apart(fqn, *map(with_one_nan, (here, there)))
                lines += [said] if said else []
            if count:
                step.result.check(
                    f"{what}: {count} weights as on the CPU", not lines, "\n".join(lines[:6])
                )


def golden(is_tiny: bool) -> list[Path]:
    """Return the checkpoints of other libraries: directories with a config, and single files."""
    root = ROOT / "tests" / "golden"
    paths = [
        config.parent for name in GOLDEN for config in sorted((root / name).rglob("config.json"))
    ]
    paths += [file for name, ends in FILES.items() for file in sorted((root / name).glob(ends))]
    return paths[::3] if is_tiny else paths


def compare_bitsandbytes(step: StepRun) -> None:
    """Report how many codes differ from those of bitsandbytes' own kernel; those of all-zero blocks do."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    from ckptmap.tensors import TensorInfo

    side = 64 if step.is_tiny else 1024
    info, w = TensorInfo((side, side), "bfloat16"), weight(side, "bfloat16")
    for kind in ("nf4", "fp4"):
        with step.result.attempt(f"bitsandbytes' {kind}"):
            packed, state = quantize_4bit(w.to(step.device), quant_type=kind)
            mine = encode(encodings(info)[f"bnb-{kind}"], info, w.to(step.device))
            differ = int((mine[""] != packed.cpu().view(-1)).sum())
            step.result.figure(
                f"bitsandbytes' {kind} on this device: bytes of codes that differ", differ
            )
            same = torch.equal(mine["absmax"], state.absmax.cpu())
            step.result.check(f"bitsandbytes' {kind} on this device: its absmax", same)
