"""`verify` and `diff` find any damage and name it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import AnswerNo, RunError, SourceError
from ckptmap.execution import manifest as manifests
from ckptmap.operations.convert import Report
from ckptmap.operations.verify import VerifyReport

SETUPS = ("hf", "full", "fsdp2", "hf-nf4", "full-nf4", "fsdp2-nf4", "fsdp2-bf16")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("verify") / "src.safetensors"
    torch.manual_seed(1)
    tensors = {f"l.{i}.weight": torch.randn(64, 128) for i in range(2)}
    save_file(tensors | {"n.weight": torch.ones(64), "scalar": torch.tensor(2.5)}, file)
    return file


def made(source: Path, folder: Path, to: str) -> Path:
    options = {"world_size": 2} if to.startswith("fsdp") else {}
    ckptmap.convert(source, folder / "out", to=to, **options)
    return folder / "out"


@pytest.mark.parametrize("to", SETUPS)
def test_every_flipped_payload_byte_is_found(to: str, source: Path, tmp_path: Path) -> None:
    out = made(source, tmp_path, to)
    assert ckptmap.verify(out).ok
    with ckptmap.open(out) as ckpt:
        chunks = [
            (key, chunk.region)
            for lazy in ckpt.values()
            for key, part in lazy.parts.items()
            for chunk in part.chunks
        ]
    rng = random.Random(to)
    for _, region in chunks:
        file, at = Path(region.file), region.offset + rng.randrange(region.nbytes)
        data = bytearray(file.read_bytes())
        data[at] ^= 1 << rng.randrange(8)
        good = file.read_bytes()
        file.write_bytes(data)
        report = ckptmap.verify(out)
        assert not report.ok
        assert "xxh3" in report.problems[0] or "CRC" in report.problems[0]
        file.write_bytes(good)
    assert ckptmap.verify(out).ok


@pytest.mark.parametrize("to", SETUPS)
def test_truncation_is_found(to: str, source: Path, tmp_path: Path) -> None:
    out = made(source, tmp_path, to)
    largest = max(
        (f for f in ([out] if out.is_file() else out.iterdir())), key=lambda f: f.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-100])
    assert not ckptmap.verify(out).ok


def test_missing_and_foreign_files(source: Path, tmp_path: Path) -> None:
    out = made(source, tmp_path, "fsdp2")
    shutil.move(out / "__1_0.distcp", tmp_path / "away")
    report = ckptmap.verify(out)
    assert not report.ok
    assert "__1_0.distcp" in str(report)


def test_values_against_another_source_differ(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    torch.manual_seed(2)
    save_file({f"l.{i}.weight": torch.randn(64, 128) for i in range(2)} | {"n.weight": torch.ones(64), "scalar": torch.tensor(2.5)}, other)  # fmt: skip
    for to, text in (
        ("full", "values differ"),
        ("hf-bf16", "not the source's cast"),
        ("hf-nf4", "quantized_data differ"),
    ):
        out = made(source, tmp_path / to, to)
        report = ckptmap.verify(out, against=other)
        assert [p.split(":")[0] for p in report.problems] == ["l.0.weight", "l.1.weight"]
        assert all(text in problem for problem in report.problems)


def test_lossy_error_is_measured(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = ckptmap.convert(source, out, to="hf-nf4")
    assert set(report.errors) == {"l.0.weight", "l.1.weight"}
    full = ckptmap.verify(out, against=source).errors
    for fqn, error in report.errors.items():
        assert 0.05 < error < 0.15
        assert error == pytest.approx(full[fqn], rel=0.2)


@pytest.mark.parametrize("report", ["convert", "verify"])
def test_nan_is_the_worst_error(report: str) -> None:
    errors = {"a": 0.1, "b": math.nan, "c": math.inf, "d": 0.2}
    if report == "convert":
        text = str(Report("out", 4, 1, 1, 0.1, {"quantize": 4}, 0, {}, {}, errors=errors))
    else:
        text = str(VerifyReport("out", 4, 1, ("structure",), (), errors))
    assert "lossy: 4 tensors, worst b: nan relative rms" in text


@pytest.mark.parametrize("sampled", [False, True])
def test_an_encoding_that_loses_finite_values_is_not_ok(
    sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an encoder lets through: `convert` sees it in its sample, `verify` everywhere."""
    lets = "ckptmap.quantization.blockwise.scaled_encoder.ScaledEncoder._overflows"
    monkeypatch.setattr(lets, lambda self, found: torch.zeros(1, dtype=torch.bool))
    values = torch.randn(512, 256, generator=torch.Generator().manual_seed(3)).half()
    values[0 if sampled else 100, 7] = -65280
    save_file({"a.weight": values, "b.weight": torch.randn(8, 8)}, tmp_path / "in.safetensors")
    into = (tmp_path / "in.safetensors", tmp_path / "out", "full-int8")
    if sampled:
        with pytest.raises(RunError, match=r"^a\.weight: int8 would decode 1 finite") as caught:
            ckptmap.convert(*into)
        assert caught.value.code == "CKM309" and not (tmp_path / "out").exists()
        return
    ckptmap.convert(*into)
    report = ckptmap.verify(tmp_path / "out", against=tmp_path / "in.safetensors")
    assert report.problems == ("a.weight: decodes 1 finite value of the source to NaN or infinity",)


@pytest.mark.parametrize("to", ["hf", "fsdp2", "full-fp32"])
def test_what_was_not_finite_before_is_no_loss(to: str, tmp_path: Path) -> None:
    values = torch.randn(8, 8)
    values[0, 0], values[1, 1] = math.nan, math.inf
    save_file({"a.weight": values.bfloat16()}, tmp_path / "in.safetensors")
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "out", to)
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "in.safetensors").ok


def test_no_manifest_is_said(source: Path) -> None:
    with pytest.raises(AnswerNo, match="has no manifest"):
        ckptmap.verify(source)
    with pytest.raises(SourceError, match="no such file"):
        ckptmap.verify(source.with_name("nothing"))


def test_manifest_of_another_schema_is_refused(source: Path, tmp_path: Path) -> None:
    out = made(source, tmp_path, "hf")
    file = out / "ckptmap.manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 99}))
    with pytest.raises(SourceError, match="manifest schema 99, expected 1"):
        ckptmap.verify(out)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("tensors",), None),
        (("tensors", "n.weight", "chunks"), [3]),
        (("tensors", "n.weight", "chunks", 0, 0), "../out/model.safetensors"),
        (("tensors", "n.weight", "chunks", 0, 1), -8),
        (("tensors", "n.weight", "chunks", 0, 4), 64),
        (("files", "/etc/passwd"), {"nbytes": 1}),
        (("files", "model.safetensors", "nbytes"), "all"),
        (("logical", "n.weight", "fidelity"), "good"),
        (("names",), {"from": 1}),
    ],
    ids=str,
)
def test_a_damaged_manifest_is_refused(
    path: tuple[str | int, ...], value: object, source: Path, tmp_path: Path
) -> None:
    out = made(source, tmp_path, "hf")
    file = out / "ckptmap.manifest.json"
    document = json.loads(file.read_text())
    place = document
    for segment in path[:-1]:
        place = place[segment]
    place[path[-1]] = value
    file.write_text(json.dumps(document))
    with pytest.raises(SourceError, match=f"its manifest is damaged at {path[0]}") as caught:
        ckptmap.verify(out)
    assert caught.value.code == "CKM403"


def test_members_that_nobody_checks_may_hold_anything(source: Path, tmp_path: Path) -> None:
    """A manifest that another program wrote again: `verify` and `report` take it, and take nothing from it."""
    out = made(source, tmp_path, "hf")
    file = out / "ckptmap.manifest.json"
    document = json.loads(file.read_text()) | {"merged": None, "world_size": "two"}
    file.write_bytes(manifests.emit(document))
    assert ckptmap.verify(out, against=source).ok
    assert "for 0 ranks, from" in ckptmap.report(out)
    with pytest.raises(SourceError) as caught:
        ckptmap.verify(out, against=source, adapter=tmp_path)
    assert caught.value.code in ("CKM101", "CKM320")


@pytest.mark.parametrize("to", ["hf", "fsdp2", "full"])
def test_a_colon_in_a_name_is_no_role(to: str, tmp_path: Path) -> None:
    """`model:b` and `b` are two weights: each is held against its own source."""
    state = {"a:b.weight": torch.randn(4, 4), "model:b": torch.ones(3), "b": torch.zeros(3)}
    torch.save(state, tmp_path / "src.pt")
    ckptmap.convert(tmp_path / "src.pt", tmp_path / "out", to=to)
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "src.pt").ok
    torch.save({**state, "model:b": torch.full((3,), 2.0)}, tmp_path / "other.pt")
    report = ckptmap.verify(tmp_path / "out", against=tmp_path / "other.pt")
    assert report.problems == ("model:model:b: values differ from the source",)


def test_sha256_of_files(source: Path, tmp_path: Path) -> None:
    import hashlib

    out = tmp_path / "out"
    ckptmap.convert(source, out, to="hf", digest="sha256")
    files = json.loads((out / "ckptmap.manifest.json").read_text())["files"]
    expected = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert files["model.safetensors"]["sha256"] == expected
    assert ckptmap.verify(out).ok


def test_an_output_without_the_digests_asked_for_is_not_taken_for_complete(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ckptmap.convert(source, out, to="hf")
    with pytest.raises(ckptmap.CkptmapError, match="exists"):
        ckptmap.convert(source, out, to="hf", digest="sha256")
    ckptmap.convert(source, out, to="hf", digest="sha256", overwrite=True)
    assert all(
        len(file["sha256"]) == 64
        for file in json.loads((out / "ckptmap.manifest.json").read_text())["files"].values()
    )
    again = ckptmap.convert(source, out, to="hf", digest="sha256", overwrite=True)
    assert "was complete already" in again.notes


def test_the_sha256_of_one_file_is_in_the_report(source: Path, tmp_path: Path) -> None:
    """Its manifest lies inside of it, and cannot state that."""
    import hashlib

    out = tmp_path / "out.pt"
    for _ in range(2):
        report = ckptmap.convert(source, out, to="full", digest="sha256")
        expected = hashlib.sha256(out.read_bytes()).hexdigest()
        assert f"sha256 of {out}: {expected}" in report.notes


def test_diff_names_what_differs(source: Path, tmp_path: Path) -> None:
    out = made(source, tmp_path, "fsdp2")
    assert ckptmap.diff(source, out, values=True).equal
    other = tmp_path / "other.pt"
    tensors = {fqn: lazy.read() for fqn, lazy in ckptmap.open(source).items()}
    changed = tensors["l.1.weight"].clone()
    changed[3, 5] += 1
    torch.save(
        {"_orig_mod.l.0.weight": tensors["l.0.weight"].bfloat16(), "_orig_mod.l.1.weight": changed,
         "_orig_mod.n.weight": torch.ones(65), "_orig_mod.new": torch.ones(1)}, other,
    )  # fmt: skip
    report = ckptmap.diff(source, other)
    assert report.only_a == ("scalar",)
    assert report.only_b == ("new",)
    assert {name: str(change) for name, change in report.changed.items()} == {
        "l.0.weight": "dtype float32 and bfloat16",
        "n.weight": "shape [64] and [65]",
    }
    report = ckptmap.diff(source, other, values=True)
    change = report.changed["l.1.weight"]
    assert "1 of 8192 values differ, by at most 1.000e+00" in str(change)
    assert "the first at [3, 5]" in str(change)
    assert (change.count, change.max_abs, change.first, change.numel) == (1, 1.0, (3, 5), 8192)
    assert 0 < change.rms < 1 and change.dtypes is change.shapes is None
    assert report.changed["l.0.weight"].dtypes == ("float32", "bfloat16")
    assert report.changed["n.weight"].shapes == ((64,), (65,))
    assert not report.equal


def test_diff_sees_tensors_that_are_neither_weights_nor_optimizer_state(tmp_path: Path) -> None:
    """An average of the weights, a random state: where both hold them."""
    for name, value, more in (("a", 1.0, {}), ("b", 2.0, {}), ("c", 1.0, {"rng": torch.ones(3)})):
        beside = {"ema": {"w": torch.full((2,), value)}, **more}
        torch.save({"model": {"w": torch.ones(2)}, **beside}, tmp_path / f"{name}.pt")
    found = ckptmap.diff(tmp_path / "a.pt", tmp_path / "b.pt", values=True)
    assert list(found.changed) == ["other:ema.w"] and not found.equal
    assert ckptmap.diff(tmp_path / "a.pt", tmp_path / "c.pt", values=True).equal


@pytest.mark.parametrize(
    "name", ["float4_e2m1fn_x2", "float8_e8m0fnu", "uint64", "complex32", "bool"]
)
def test_diff_counts_in_every_dtype(name: str, tmp_path: Path) -> None:
    raw = torch.zeros(32, dtype=torch.uint8)
    for value in (0, 1):
        raw[24] = value
        torch.save({"w": raw.clone().view(getattr(torch, name))}, tmp_path / f"{value}.pt")
    found = ckptmap.diff(tmp_path / "0.pt", tmp_path / "1.pt", values=True)
    assert re.match(r"1 of \d+ values differ", str(found.changed["w"]))
    torch.save({"w": torch.zeros(raw.view(getattr(torch, name)).numel())}, tmp_path / "f32.pt")
    other = ckptmap.diff(tmp_path / "f32.pt", tmp_path / "1.pt").changed["w"]
    assert "float32 and " in str(other)
    assert not ckptmap.diff(tmp_path / "f32.pt", tmp_path / "1.pt", values=True).equal


def test_diff_across_encodings_measures(source: Path, tmp_path: Path) -> None:
    report = ckptmap.diff(source, made(source, tmp_path, "hf-nf4"), values=True)
    assert set(report.changed) == {"l.0.weight", "l.1.weight"}
    assert all("encoding dense and nf4" in str(why) for why in report.changed.values())


def test_diff_groups_by_pattern_and_sorts_by_error(tmp_path: Path) -> None:
    """The worst group first, and in it the worst tensor; the last words say how many differ."""
    a = {f"h.{n}.{w}": torch.ones(4, 4) for n in range(5) for w in ("q", "up", "norm")}
    b = {key: tensor.clone() for key, tensor in a.items()} | {"extra": torch.ones(1)}
    for n in range(5):
        b[f"h.{n}.up"][n % 4, 1] += 2.0**-n
        b[f"h.{n}.q"] += 3.0 + n
    b["h.3.norm"] = torch.ones(5)
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    report = ckptmap.diff(tmp_path / "a.pt", tmp_path / "b.pt", values=True)
    lines = str(report).splitlines()
    assert lines[0].endswith("b.pt: extra")
    assert lines[1:-1] == [
        "tensors that differ, with the number of values, the largest difference and the relative rms:",
        "  h.3.norm     1x  shape [4, 4] and [5]",
        "  h.{0..4}.q   5x  80 of 80, max 7.000e+00, rms 7.000e+00, worst in h.4",
        "  h.{0..4}.up  5x  5 of 80, max 1.000e+00, rms 2.500e-01, worst in h.0",
    ]
    assert lines[-1].startswith("different: 4 tensors agree in shape, dtype, encoding and values; ")
    assert "; 11 of 15 differ, 1 is only in " in lines[-1]
    document = report.to_json()
    assert document["changes"]["h.0.up"] == {  # type: ignore[index]
        "shapes": None, "dtypes": None, "encodings": None, "numel": 16, "count": 1, "max_abs": 1.0,
        "rms": 0.25, "first": (0, 1),
    }  # fmt: skip


def test_diff_says_that_stored_keys_differ_where_plain_ones_agree(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    torch.save(torch.nn.DataParallel(model).state_dict(), tmp_path / "wrapped.pt")
    report = ckptmap.diff(tmp_path / "wrapped.pt", tmp_path / "plain.pt", values=True)
    assert report.equal
    assert report.stored_keys["0.weight"] == ("module.0.weight", "0.weight")
    assert "stored keys of 2 names differ, as in 'module.0.weight' and '0.weight'" in str(report)
    same = ckptmap.diff(tmp_path / "plain.pt", tmp_path / "plain.pt")
    assert not same.stored_keys and "stored keys" not in str(same)


def changed(what: str) -> dict[str, object]:
    """A training run's file, of which one plain value is another; "": none is."""
    model = torch.nn.Linear(4, 2, dtype=torch.float32)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if what == "lr" else 0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    names = ["cat", "dog"] if what == "kind" else {0: "cat", 1: "dog"}
    plain = {"step": 8 if what == "step" else 7, "names": names, "nan": float("nan")}
    more = {"note": "x"} if what == "more" else {}
    state = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    return {"model": state, "optimizer": optimizer.state_dict(), **plain, **more}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("", ""),
        ("lr", r"param_groups\.0\.lr: 0\.1, the source has 0\.5"),
        ("step", "step: 7, the source has 8"),
        ("kind", "names.0: is no tensor, and is not in the output"),
        ("more", "note: is no tensor, and is not in the output"),
    ],
)
@pytest.mark.parametrize("to", ["full", "fsdp2"])
def test_plain_values_and_settings_are_compared(
    to: str, what: str, says: str, tmp_path: Path
) -> None:
    torch.save(changed(""), tmp_path / "src.pt")
    torch.save(changed(what), tmp_path / "other.pt")
    ckptmap.convert(tmp_path / "src.pt", tmp_path / "out", to=to)
    report = ckptmap.verify(tmp_path / "out", against=tmp_path / "other.pt")
    assert report.ok == (not what)
    assert not says or re.search(says, "\n".join(report.problems))
    found = ckptmap.diff(tmp_path / "other.pt", tmp_path / "out")
    expected = {
        "lr": {"optimizer.param_groups.0.lr": "0.5 and 0.1"}, "step": {"step": "8 and 7"},
        "kind": {"names.0": "'cat' and nothing", "names.1": "'dog' and nothing"},
    }.get(what, {})  # fmt: skip
    assert found.settings == expected and found.equal == (not expected)
    assert ("what is no tensor:" in str(found)) == bool(expected)


@pytest.mark.parametrize(
    ("mine", "theirs", "settings"),
    [
        ([1, 2], [1, 2, 3], {"x.2": "nothing and 3"}),
        ([1, 2], [1, 2, None], {"x.2": "nothing and None"}),
        ({}, {"a": 1}, {"x": "{} and nothing", "x.a": "nothing and 1"}),
        (3, [3], {"x": "3 and nothing", "x.0": "nothing and 3"}),
        ([], 3, {"x": "[] and 3"}),
        ({"a": []}, {"a": [1]}, {"x.a": "[] and nothing", "x.a.0": "nothing and 1"}),
        ([{"a": 1}, 2], [None, 2], {"x.0.a": "1 and nothing"}),
        (3, torch.tensor(4.0), {"x": "3 and a tensor"}),
        ({"n": 1}, {"n": 1, "t": torch.ones(1)}, {}),
        ((1, (2,)), [1, [2]], {}),
        ({1: 2}, {"1": 2}, {}),
    ],
)
def test_entries_of_other_lengths_and_kinds_differ(
    mine: object, theirs: object, settings: dict[str, str], tmp_path: Path
) -> None:
    for name, value in (("a", mine), ("b", theirs)):
        torch.save({"model": {"w": torch.ones(2)}, "x": value, name: 1}, tmp_path / name)
    found = ckptmap.diff(tmp_path / "a", tmp_path / "b", values=True)
    assert found.settings == settings
    back = ckptmap.diff(tmp_path / "b", tmp_path / "a", values=True)
    assert back.equal == (not settings) and {*back.settings} == {*settings}


def test_what_an_output_holds_beyond_its_source_is_reported(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    torch.save({"model": weights, "x": [1, 2, 3], "y": 1}, tmp_path / "src")
    torch.save({"model": weights, "x": [1, 2]}, tmp_path / "other")
    ckptmap.convert(tmp_path / "src", tmp_path / "out", to="full")
    problems = ckptmap.verify(tmp_path / "out", against=tmp_path / "other").problems
    assert problems == ("x.2: 3 is in the output only",)


def test_a_list_keeps_its_places(tmp_path: Path) -> None:
    """What is left out of one is None, as torch fills it: all others keep their index."""
    w = torch.ones(2)
    ema = [{"w": w + 1}, {"w": w + 2}, {"w": w + 3}]
    torch.save({"model": {"w": w}, "ema": ema, "x": [w, 5, {"n": 1}]}, tmp_path / "src")
    last = tmp_path / "src"
    for number, to in enumerate(("full", "fsdp2", "full")):
        out = tmp_path / str(number)
        ckptmap.convert(last, out, to=to, drop=["ema.0.*", "x.0"] if number == 0 else [])
        assert (
            ckptmap.verify(out, against=last).ok
            and ckptmap.verify(out, against=tmp_path / "src").ok
        )
        assert ckptmap.diff(tmp_path / "src", out, values=True).equal
        last = out
    held = torch.load(last)["extra"]
    assert held["ema"][0] is None and held["x"] == [None, 5, {"n": 1}]
    assert [float(item["w"][0]) for item in held["ema"][1:]] == [3, 4]


@pytest.mark.parametrize("to", ["full", "fsdp2"])
def test_what_lies_beside_a_model_in_a_list_keeps_its_number(to: str, tmp_path: Path) -> None:
    torch.save([{"w": torch.ones(2)}, 3, "x"], tmp_path / "src")
    ckptmap.convert(tmp_path / "src", tmp_path / "out", to=to)
    held = ckptmap.open(tmp_path / "out").extra
    assert {int(key): value for key, value in held.items()} == {1: 3, 2: "x"}
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "src").ok
    assert ckptmap.diff(tmp_path / "src", tmp_path / "out").same_settings == 2


def test_a_number_beside_the_weights_buries_nothing_in_dcp(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    for step in (1, 2):
        torch.save({"model": weights, 5: 6, "step": step, "d": {7: 8}}, tmp_path / f"{step}.pt")
    ckptmap.convert(tmp_path / "1.pt", tmp_path / "out", to="fsdp2")
    assert ckptmap.open(tmp_path / "out").extra == {"5": 6, "step": 1, "d": {7: 8}}
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "1.pt").ok
    assert ckptmap.diff(tmp_path / "2.pt", tmp_path / "out").settings == {"step": "2 and 1"}
    torch.save({"model": weights, 5: 6, "5": 7}, tmp_path / "both.pt")
    with pytest.raises(ckptmap.CkptmapError, match="would be written twice"):
        ckptmap.plan(tmp_path / "both.pt", "fsdp2")
