"""Tests of a mapping file: it is proven, maps numbers there and back, matches a golden table, and refuses.

    from ckptmap.testing import MappingKit
    MappingKit("mappings/mine.toml").run()

Files beside `mine.toml` take part in its tests:

    mine.config.json     the config of a tiny model, best with pairwise different sizes; without it a
                         typical tiny config is used
    mine.tsv             a golden table, `key, dtype, shape, axes, hash`: the hub's state dict, filled with
                         consecutive numbers in key order, under the scheme's names
    mine.refused.toml    [[refused]] entries: a change to that state dict and the error code it must get

The pytest plugin collects files that match the setting `ckptmap_mappings`; each check is one test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmap.core.json_text import parse_object
from ckptmap.core.toml_text import TomlError, parse_toml
from ckptmap.errors import CkptmapError, PlanError
from ckptmap.mapping.expected_keys import TYPICAL, expected_tensors
from ckptmap.mapping.mapping_file import load_scheme
from ckptmap.mapping.resolve import Resolution
from ckptmap.mapping.rules import NamingScheme
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.mapping.translate_state_dict import applied
from ckptmap.storage.lazy_tensor import info_of
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import ITEMSIZE, TensorInfo
from ckptmap.testing.base import expect

if TYPE_CHECKING:
    import torch

COLUMNS = "key\tdtype\tshape\taxes\thash"
DTYPES = (
    "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8", "uint8", "int64", "bool",
    "complex64",
)  # fmt: skip
"""One dtype for each way in which dtypes are stored."""
_INTEGER = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class Row:
    """One tensor of a golden table; `axes` is `-` where the table does not give it."""

    dtype: str
    shape: tuple[int, ...]
    axes: str
    hash: str


# --------------------------------------------------------------------------------- numbers


def iota(infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Return a state dict filled with consecutive numbers over the sorted keys: each element is unique.

    A dtype that cannot hold such numbers gets their lowest bits as its bit pattern.
    """
    import torch

    tensors, start = {}, 0
    for key in sorted(infos):
        shape, dtype = infos[key].shape, infos[key].dtype
        ids = torch.arange(start, start + prod(shape), dtype=torch.int64)
        start += prod(shape)
        if dtype in ("float32", "float64", "int64", "int32"):
            values = ids.to(getattr(torch, dtype))
        elif dtype == "bool":
            values = (ids * 0x9E3779B1 >> 7 & 1).bool()
        else:
            values = ids.to(getattr(torch, _INTEGER[ITEMSIZE[dtype]])).view(getattr(torch, dtype))
        tensors[key] = values.reshape(shape)
    return tensors


def table(
    state: Mapping[str, torch.Tensor], axes: Mapping[str, str] | None = None
) -> dict[str, Row]:
    """Return a row for each tensor, in key order; the hash is xxh3-64 of its row-major bytes."""
    import xxhash

    rows = {}
    for key, tensor in sorted(state.items()):
        info = info_of(tensor)
        digest = xxhash.xxh3_64_hexdigest(tensor_bytes(tensor.detach().cpu().contiguous()))
        rows[key] = Row(info.dtype, info.shape, (axes or {}).get(key, "-"), digest)
    return rows


def write_table(path: str | Path, rows: Mapping[str, Row], made_by: str) -> None:
    """Write a golden table; `made_by` says how, for whoever has to write it again."""
    lines = [f"# {made_by}", COLUMNS]
    for key, row in sorted(rows.items()):
        shape = ",".join(map(str, row.shape))
        lines.append(f"{key}\t{row.dtype}\t{shape}\t{row.axes}\t{row.hash}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_table(path: str | Path) -> dict[str, Row]:
    """Read a golden table. Raises PlanError CKM616 where the file is not one."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if not line.startswith("#")]
        rows = [line.split("\t") for line in lines[1:]]
        if not lines or lines[0] != COLUMNS or any(len(row) != 5 for row in rows):
            raise ValueError(f"its columns are not {COLUMNS.split()}")
        return {
            key: Row(dtype, tuple(int(n) for n in shape.split(",") if n), axes, digest)
            for key, dtype, shape, axes, digest in rows
        }
    except (OSError, ValueError) as error:
        raise PlanError(
            "CKM616", f"{path}: is not a golden table: {error}", "write it with `write_table`"
        ) from error


# --------------------------------------------------------------------------------- the kit


class MappingKit:
    """All tests of one mapping file.

    `config` is the config of a tiny model; None: the file beside the mapping file, else a typical one.
    """

    def __init__(self, path: str | Path, config: Mapping[str, object] | None = None) -> None:
        self.path = Path(path)
        self.config = dict(config) if config is not None else self._config()
        self._scheme: NamingScheme | None = None

    def checks(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield (name of a check, its arguments), cheapest and most basic first."""
        yield "proof", ()
        for dtype in DTYPES:
            yield "round_trip", (dtype,)
        if self.golden.is_file():
            yield "golden", ()
        for number, _ in enumerate(self.refused()):
            yield "refuses", (str(number),)

    def run(self) -> list[str]:
        """Run every check and return their names. Raises AssertionError, or PlanError for a bad file."""
        done = []
        for name, arguments in self.checks():
            self.check(name, *arguments)
            done.append(" ".join([name, *arguments]))
        return done

    def check(self, name: str, *arguments: str) -> None:
        getattr(self, f"check_{name}")(*arguments)

    # ------------------------------------------------------------------ what is beside it

    @property
    def golden(self) -> Path:
        return self.path.with_suffix(".tsv")

    def refused(self) -> list[dict[str, Any]]:
        file = self.path.with_suffix(".refused.toml")
        if not file.is_file():
            return []
        try:
            cases = parse_toml(file.read_text(encoding="utf-8"))["refused"]
            expect(isinstance(cases, list) and all("code" in case for case in cases), "no code")
        except (TomlError, KeyError, AssertionError) as error:
            raise PlanError(
                "CKM616", f"{file}: is not a list of [[refused]] with a code: {error}", "correct it"
            ) from error
        return list(cases)

    def _config(self) -> dict[str, object]:
        file = self.path.with_suffix(".config.json")
        if not file.is_file():
            return dict(TYPICAL)
        return parse_object(file.read_bytes(), allow_nan=True)

    @property
    def scheme(self) -> NamingScheme:
        if self._scheme is None:
            self._scheme = load_scheme(self.path)
        return self._scheme

    def source(self, dtype: str = "float32") -> dict[str, torch.Tensor]:
        """Return the state dict to map, under the hub's names."""
        return iota(expected_tensors(self.scheme, self.config, hub=True, dtype=dtype))

    def there(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Map from the hub to the scheme. Raises PlanError CKM609 for a key that no rule matches."""
        return self._mapped(state, None, self.scheme)

    def back(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Map from the scheme to the hub. Raises PlanError CKM609 for a key that no rule matches."""
        return self._mapped(state, self.scheme, None)

    def _mapped(
        self,
        state: Mapping[str, torch.Tensor],
        source: NamingScheme | None,
        target: NamingScheme | None,
    ) -> dict[str, torch.Tensor]:
        return applied(self._resolved(state, source, target), state)

    def _resolved(
        self,
        state: Mapping[str, torch.Tensor],
        source: NamingScheme | None,
        target: NamingScheme | None,
    ) -> Resolution:
        infos = {key: info_of(tensor) for key, tensor in state.items()}
        resolution = translate(infos, source, target, self.config)
        if resolution.unmapped:
            raise PlanError(
                "CKM609",
                f"{self.scheme.title}: no rule matches {resolution.unmapped[0]}",
                "add a rule",
            )
        return resolution

    # ------------------------------------------------------------------ checks

    def check_proof(self) -> None:
        """Check that the file loads, which proves its rules."""
        self._scheme = load_scheme(self.path)

    def check_round_trip(self, dtype: str) -> None:
        """Check that the state dict comes back bit for bit.

        Values that a value operation changes are excepted: rounding may lose bits. The golden table checks
        them. A tensor whose operation states a dtype comes back in that dtype: the scheme holds no other.
        """
        import torch

        source = self.source(dtype)
        mapped = self.there(source) if self._can_hold(dtype) else {}
        if not mapped:
            return
        back = self.back(mapped)
        changed = self._changed()
        made = self._resolved(mapped, self.scheme, None).targets
        for key, tensor in source.items():
            if key not in back and key in self._dropped(source):
                continue
            expect(key in back, f"{key} does not come back")
            found = info_of(back[key])
            wanted = TensorInfo(tuple(tensor.shape), made[key].stated_dtype or dtype)
            expect(found == wanted, f"{key}: comes back as {found}, expected {wanted}")
            if key not in changed and not torch.equal(_bits(back[key]), _bits(tensor)):
                expect(False, f"{key}: {_first_difference(tensor, back[key])}")

    def check_golden(self) -> None:
        """Check that the state dict under the scheme's names equals the golden table."""
        rows, mapped = read_table(self.golden), table(self.there(self.source()))
        for key, row in rows.items():
            expect(key in mapped, f"{key}: is in {self.golden.name} and is not made")
            tensor = mapped[key]
            expect(
                (tensor.dtype, tensor.shape, tensor.hash) == (row.dtype, row.shape, row.hash),
                f"{key}: made {tensor.dtype}{list(tensor.shape)} {tensor.hash},"
                f" {self.golden.name} has {row.dtype}{list(row.shape)} {row.hash}",
            )
        for key in mapped:
            expect(key in rows, f"{key}: is made and is not in {self.golden.name}")

    def check_refuses(self, number: str) -> None:
        """Check that a faulty state dict or config raises the error code that the file states."""
        case = self.refused()[int(number)]
        state = {str(case.get("prefix", "")) + k: v for k, v in self._spoilt(case).items()}
        kit = MappingKit(self.path, {**self.config, **case.get("config", {})})
        try:
            kit.there(state)
        except CkptmapError as error:
            expect(error.code == case["code"], f"{error.code}: {error}, expected {case['code']}")
            return
        expect(False, f"{case.get('why', case)}: was mapped, expected {case['code']}")

    # ------------------------------------------------------------------ details

    def _spoilt(self, case: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        import torch

        state = self.source()
        for key in case.get("without", []):
            expect(key in state, f"{case.get('why', case)}: {key} is not there to be left out")
            del state[key]
        for key, shape in case.get("add", {}).items():
            state[key] = torch.zeros(shape)
        return state

    def _can_hold(self, dtype: str) -> bool:
        """Return whether the rules can map tensors of a dtype: value operations need floating values."""
        return not any(rule.op for rule in self.scheme.rules) or dtype.startswith(("float", "bf"))

    def _changed(self) -> set[str]:
        """Return the keys whose values a value operation changes."""
        rules = [rule for rule in self.scheme.rules if rule.op]
        shapes = {name.skeleton for rule in rules for t in rule.hub for name in t.names}
        from ckptmap.mapping.name_patterns import skeleton

        keys = expected_tensors(self.scheme, self.config, hub=True)
        return {key for key in keys if skeleton(key)[0] in shapes}

    def _dropped(self, source: Mapping[str, torch.Tensor]) -> set[str]:
        infos = {key: info_of(tensor) for key, tensor in source.items()}
        return set(translate(infos, None, self.scheme, self.config).dropped)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first_difference(before: torch.Tensor, after: torch.Tensor) -> str:
    """Describe the first element that differs."""
    rows, itemsize = before.numel(), before.element_size()
    unequal = (_bits(before) != _bits(after)).view(rows, itemsize).any(1)
    at = int(unequal.nonzero()[0])
    return f"element {at} of {rows} is {after.reshape(-1)[at]}, expected {before.reshape(-1)[at]}"
