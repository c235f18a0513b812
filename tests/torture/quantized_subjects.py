"""Quantized releases and GGUF files as subjects of mutants: read, kept in other forms, written, and given back.

hqq, optimum-quanto, compressed-tensors, transformers and the `gguf` package wrote theirs here, auto-round those of
`golden/gptq`. Hand-made are: two of these (`make_gptq.py` names them), blocks of random bytes in GGUF files, and the
bytes of gpt-oss' experts, whose writer needs a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.planning.report import Report
from tests.support.paths import GOLDEN
from tests.torture import mutators as m
from tests.torture import quantized_mutators as q
from tests.torture import quantized_readers as k
from tests.torture import readers as r
from tests.torture import torch_mutators as t
from tests.torture.subjects import BYTES, CONFIGURED, TENSORS, Subject, converted
from tests.torture.tree_mutators import tree

RELEASE = (*CONFIGURED, *[q.hostile_config] * 4, *[q.parts] * 4)
CODED = (*TENSORS, *[m.safetensors_tensor] * 2, *[q.parts] * 4)
GGUF = (*BYTES, *[q.gguf_header] * 5, q.gguf_data)
FILE = "model.safetensors"
TOLD = (
    "config.json: ", "the file says nothing of the model", "the metadata state no ",
    "config.json beside the source describes ",
)  # fmt: skip
"""How notes begin on metadata of GGUF that are left out, or lacking; and on weights that are not the config's."""


def quantized(folder: Path) -> list[Subject]:
    """Return the subjects; what they are made of is written to `folder`."""
    place = folder / "quantized"
    place.mkdir()
    return [
        *grouped(), *hqq(place), *quanto(place), *gguf(place), *experts(place), *given_back(place)
    ]  # fmt: skip


def grouped() -> list[Subject]:
    """GPTQ and AWQ, decoded; and their codes kept as those of compressed-tensors."""
    names = ("gptq-4", "gptq-4-asym", "gptq-3", "gptq-4-v2", "gptq-4-order", "awq-4", "awq-4-asym")
    kept = {"gptq-4": "int4", "gptq-4-asym": "int4", "gptq-8": "int8", "awq-4": "int4"}
    at = GOLDEN / "gptq"
    return [
        *(converted(name, at / name, RELEASE, _reader(name), "full-fp32") for name in names),
        *(
            kept_codes(
                converted(
                    f"{name}-kept", at / name, RELEASE, _reader(name), f"hf-ct-{to}",
                    written=k.read_ct_packed,
                )
            )
            for name, to in kept.items()
        ),
    ]  # fmt: skip


def kept_codes(subject: Subject) -> Subject:
    """The subject, refused where the report says that codes are not kept: so the user is told."""

    def work(path: Path, dst: Path) -> None:
        report = subject.work(path, dst)
        assert isinstance(report, Report)
        if "requantize" in report.fidelity:
            raise PlanError("CKM204", f"reported: {report.fidelity}", "")

    return replace(subject, work=work)


def _reader(name: str) -> Any:
    return k.read_awq if name.startswith("awq") else k.read_gptq


def hqq(folder: Path) -> list[Subject]:
    from tests.quantization.test_hqq import layers, written

    found = []
    for nbits, axis in ((4, 1), (3, 0), (8, 1)):
        place = folder / f"hqq-{nbits}-{axis}"
        written(place, layers(nbits, axis))
        found.append(converted(place.name, place, CODED, k.read_hqq, "full-fp32"))
    return found


def quanto(folder: Path) -> list[Subject]:
    from tests.quantization.test_quanto import model, save_model, written

    with k.quanto_in_torch():
        made = model(torch.bfloat16)
        written(folder / "quanto-qint8", made, "qint8")
        save_model(folder / "quanto-qint4", "qint4", 160)
    mapped = (*CODED, q.quantization_map, q.model_config, q.model_config)
    return [
        converted(
            "quanto-qint8", folder / "quanto-qint8", CODED,
            lambda path: k.read_quanto_file(path, made), "full-fp32",
        ),
        replace(
            converted("quanto-qint4", folder / "quanto-qint4", mapped, k.read_quanto_model, "full-fp32"),
            work=partial(_written_or_told, to="full-fp32"),
        ),
    ]  # fmt: skip


def gguf(folder: Path) -> list[Subject]:
    """Tensors of every type; a Llama made a model of transformers, and one of transformers made GGUF."""
    from tests.support.gguf_files import ENCODED, blocks, write
    from tests.support.gguf_models import MODELS, build, write_model

    tensors = {f"{kind}.w": (kind, blocks(kind, (2, 256))) for kind in ENCODED}
    types = write(folder / "types.gguf", tensors, llama__block_count=2, some__list=[1, 2, 3])
    place = folder / "gguf-model"
    place.mkdir()
    built = build(MODELS["llama"])
    model = write_model(MODELS["llama"], built, place / "m.gguf", "Q5_1")
    built.to(torch.bfloat16).save_pretrained(folder / "llama")
    source = (*TENSORS, *[q.model_config] * 5, m.json_of("config.json"), *[q.parts] * 2)
    return [
        converted("gguf-types", types, GGUF, _as_bf16, "full-bf16", wide=True),
        replace(
            converted(
                "gguf-model", model, GGUF, k.read_gguf_model, "hf-bf16", written=k.read_hf_model, wide=True,
            ),
            work=partial(_written_or_told, to="hf-bf16", names="hf"),
        ),
        replace(
            converted(
                "gguf-written", folder / "llama", source, k.read_as_q8_0, "gguf-q8_0",
                written=k.read_gguf_with_sizes, wide=True,
            ),
            work=partial(_written_or_told, to="gguf-q8_0"),
        ),
    ]  # fmt: skip


def _written_or_told(path: Path, dst: Path, to: str, **options: Any) -> None:
    """Convert. Raise PlanError CKM203 with the note on metadata that are left out: the user was told."""
    report = ckptmap.convert(path, dst, to, sync=False, keep_layout=False, **options)
    for note in report.notes:
        if note.startswith(TOLD):
            raise PlanError("CKM203", note, "")


def _as_bf16(path: Path) -> r.Named:
    return {name: value.bfloat16() for name, value in r.read_gguf(path).items()}


def experts(folder: Path) -> list[Subject]:
    """MXFP4 of gpt-oss as that of compressed-tensors, and back: the codes are moved."""
    from tests.quantization.test_moved_codes import MODULES
    from tests.support.gpt_oss import quantized as codes
    from tests.support.gpt_oss import write

    names = folder / "modules.toml"
    names.write_text(MODULES)
    stacked = {key: w for key, w in codes()[0].items() if ".experts." in key and "bias" not in key}
    source = write(folder / "mxfp4-stacked", stacked)
    modules = folder / "mxfp4-modules"
    there: Mapping[str, Any] = {"names": str(names), "encode": ("*_proj.weight",)}
    ckptmap.convert(source, modules, "hf-ct-mxfp4", sync=False, **there)
    (modules / "ckptmap.manifest.json").unlink()
    back = {"names_from": str(names), "names": "hf", "config_from": str(source)}
    moved = (
        converted(
            "mxfp4-to-ct", source, RELEASE, k.read_experts_as_modules, "hf-ct-mxfp4",
            written=r.read_compressed, **there,
        ),
        converted(
            "mxfp4-from-ct", modules, RELEASE, k.read_modules_as_experts, "hf-mxfp4",
            written=r.read_mxfp4, **back,
        ),
    )  # fmt: skip
    return [kept_codes(subject) for subject in moved]


def given_back(folder: Path) -> list[Subject]:
    """Trained weights as a release of GPTQ (`--as`): either of the two is damaged."""
    place = folder / "as"
    shutil.copytree(GOLDEN / "gptq" / "gptq-4", place / "release")
    ckptmap.convert(place / "release", place / "work.pt", "full-bf16", sync=False)
    state = torch.load(place / "work.pt", weights_only=True)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        state[name] += torch.arange(state[name].numel()).view_as(state[name]) % 7 / 64
    torch.save(state, place / "work.pt")
    trained: Sequence[m.Mutator] = (t.archive, tree, tree, tree)

    def work(path: Path, dst: Path) -> None:
        ckptmap.convert(path / "work.pt", dst, as_=path / "release", sync=False)

    return [
        Subject(
            "as-gptq", place, (*RELEASE, *trained, *trained),
            lambda path: r.content(k.read_given_back(path)), work,
            lambda dst: r.content(k.read_gptq(dst)),
        )
    ]  # fmt: skip
