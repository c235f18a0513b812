"""`--as PATH`: a low-bit release into training and back, and what was not trained is its bytes again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import ckptmap
from ckptmap.errors import ArgumentError, CkptmapError, DestinationError, PlanError, SourceError
from tests.corpus.models import tiny_llama
from tests.corpus.ranks import run_ranks
from tests.ranks.train_two import TRAINED
from tests.support import bnb_cases
from tests.support.int8_models import QUERY, compressed, dense, llama, loaded, logits
from tests.support.paths import GOLDEN
from tests.support.quantized_models import WRITERS

FILE = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"


def deepseek(path: Path) -> None:
    """A model whose linear layers transformers' own quantizer stores in tiles of 128 x 128, saved."""

    class Quantizer:
        class quantization_config:
            weight_block_size = (128, 128)
            scale_fmt = "float"

    dense(path, hidden=128)
    tensors = load_file(path / FILE)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        tensors |= Fp8Quantize(Quantizer()).convert({key: tensors.pop(key)})
    save_file(tensors, path / FILE, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def int4(path: Path) -> None:
    compressed(
        path, QuantizationArgs(num_bits=4, strategy="group", group_size=32), "pack-quantized"
    )


RELEASES: Mapping[str, Callable[[Path], object]] = {
    "ct-int4": int4,
    "fp8": deepseek,
    "bnb-nf4": WRITERS["bnb-nf4"],
}
FORMS: Mapping[str, Callable[[Path], object]] = {
    **RELEASES,
    **{name: WRITERS[name] for name in ("ct-packed", "ct-int8", "ct-fp8", "bnb-int8", "torchao")},
    "fp8-static": WRITERS["fp8"],
    "nf4": WRITERS["nf4"],
}


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of `FORMS`, made when they are first asked for."""
    folder = tmp_path_factory.mktemp("releases")

    def written(form: str) -> Path:
        path = folder / form / "release"
        if not path.exists():
            path.parent.mkdir()
            FORMS[form](path)
        return path

    return written


def weights_file(path: Path) -> Path:
    (file,) = path.glob("*.safetensors")
    return file


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def edited(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A `torch.save` file with changed values."""
    state = torch.load(path)
    change(state)
    torch.save(state, path)
    return path


def noisy(*names: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Let training change these weights."""

    def change(state: dict[str, torch.Tensor]) -> None:
        maker = torch.Generator().manual_seed(1)
        for name in names:
            noise = torch.randn(state[name].shape, generator=maker) * 0.01
            state[name] = state[name] + noise.to(state[name].dtype)

    return change


# ------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("form", FORMS)
def test_unchanged_weights_are_the_bytes_of_the_release(
    form: str, releases: Callable[[str], Path], tmp_path: Path
) -> None:
    release = releases(form)
    for dtype in ("bf16", "fp32"):
        work, back = tmp_path / f"{dtype}.pt", tmp_path / f"back-{dtype}"
        ckptmap.convert(release, work, to=f"full-{dtype}")
        whole = ckptmap.convert(work, tmp_path / f"same-{dtype}", as_=release)
        assert whole.likeness is not None and not whole.likeness.changed
        if form != "torchao":  # its JSON names the parts in another order
            same = weights_file(tmp_path / f"same-{dtype}")
            assert same.read_bytes() == weights_file(release).read_bytes(), same
        edited(work, noisy(QUERY, NORM))
        report = ckptmap.convert(work, back, as_=release)
        assert report.likeness is not None
        assert report.likeness.identical == report.likeness.weights - 2
        assert report.likeness.changed.keys() == {QUERY, NORM}
        assert report.likeness.changed[QUERY] == "quantize"
        assert (back / "config.json").read_bytes() == (release / "config.json").read_bytes()
        given, got = load_file(weights_file(release)), load_file(weights_file(back))
        stem = QUERY.removesuffix(".weight")
        assert {k: (t.dtype, t.shape) for k, t in given.items()} == {
            k: (t.dtype, t.shape) for k, t in got.items()
        }
        for key, tensor in given.items():
            if key != NORM and not key.startswith(stem):
                assert same_bytes(tensor, got[key]), key
        verified = ckptmap.verify(back, against=work)
        assert verified.ok, verified
        with ckptmap.open(back) as ckpt:
            wanted = torch.load(work)[QUERY].float()
            values = ckpt[QUERY].read().float()
            assert float((values - wanted).norm() / wanted.norm()) < 0.1
            assert ckpt[QUERY].encoding_ == ckptmap.open(release)[QUERY].encoding_


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_changed_weights_of_double_quantized_releases(kind: str, tmp_path: Path) -> None:
    """bitsandbytes' JSON of a weight ends with an offset of as many digits as it has; ours leaves room for any."""
    release, work = tmp_path / "release", tmp_path / "work.pt"
    bnb_cases.quantized(dense(tmp_path / "dense"), kind, True).save_pretrained(release)
    ckptmap.convert(release, work, to="full-bf16")
    edited(work, noisy(QUERY, NORM))
    report = ckptmap.convert(work, tmp_path / "back", as_=release)
    assert report.likeness is not None
    assert report.likeness.changed == {QUERY: "quantize", NORM: "bytes"}
    given, got = load_file(release / FILE), load_file(tmp_path / "back" / FILE)
    assert given.keys() == got.keys()
    stem = QUERY.removesuffix("weight")
    for key, tensor in given.items():
        if key != NORM and not key.startswith(stem):
            assert same_bytes(tensor, got[key]), key
    assert bool(logits(loaded(tmp_path / "back")).isfinite().all())
    with ckptmap.open(tmp_path / "back") as ckpt:
        wanted, values = torch.load(work)[QUERY].float(), ckpt[QUERY].read().float()
        assert ckpt[QUERY].encoding == f"bnb-{kind}-dq"
        assert float((values - wanted).norm() / wanted.norm()) < 0.15


def test_outliers_that_the_scales_of_a_release_cannot_hold(tmp_path: Path) -> None:
    """`--to` stores such scales exactly; the form of the release is what `--as` asks for."""
    release = GOLDEN / "torchao" / "0.18-nf4.pt"
    ckptmap.convert(release, tmp_path / "work.pt", to="full-fp32")

    def change(state: dict[str, torch.Tensor]) -> None:
        state["1.weight"] = (state["1.weight"].flip(0) * 1.25).contiguous()

    edited(tmp_path / "work.pt", change)
    with pytest.raises(CkptmapError, match="would decode to zero") as caught:
        ckptmap.convert(tmp_path / "work.pt", tmp_path / "back.pt", as_=release)
    assert caught.value.code == "CKM311" and "--to hf-bf16" in caught.value.hint
    assert not (tmp_path / "back.pt").exists()


def test_trained_under_fsdp2_and_given_back(
    releases: Callable[[str], Path], tmp_path: Path
) -> None:
    for form in RELEASES:
        (tmp_path / form).mkdir()
        shutil.copytree(releases(form), tmp_path / form / "release")
        ckptmap.convert(
            tmp_path / form / "release", tmp_path / form / "work", to="fsdp2-bf16", world_size=2
        )
    run_ranks("tests.ranks.train_two", 2, [str(tmp_path)], timeout=300)
    for form in RELEASES:
        folder = tmp_path / form
        report = ckptmap.convert(folder / "trained", folder / "back", as_=folder / "release")
        assert report.likeness is not None
        assert report.likeness.changed.keys() == set(TRAINED), report
        assert f"{report.likeness.weights - 2} of {report.likeness.weights} weights" in str(report)
        assert ckptmap.verify(folder / "back").ok
        assert ckptmap.verify(folder / "back", against=folder / "trained").ok
        if form == "fp8":  # transformers runs it on GPUs alone
            continue
        with ckptmap.open(folder / "trained") as trained:
            truth = llama(torch.float32)
            truth.load_state_dict({fqn: trained[fqn].read().float() for fqn in trained})
        wanted, got = logits(truth.eval()), logits(loaded(folder / "back")).float()
        assert float((got - wanted).norm() / wanted.norm()) < 0.1, form


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_on_the_same_grid_are_kept(bits: int, tmp_path: Path) -> None:
    """From scales in bfloat16 to scales in float16: one grid, and no weight is quantized twice."""
    form = QuantizationArgs(num_bits=bits, strategy="group", group_size=32)
    for name, dtype in (("work", torch.bfloat16), ("release", torch.float16)):
        compressed(tmp_path / name, form, "pack-quantized", dtype=dtype)
    state = load_file(tmp_path / "release" / FILE)
    for key, tensor in state.items():  # so that the release is another model of the same form
        if key.endswith("weight_scale"):
            tensor *= 1.5
    save_file(state, tmp_path / "release" / FILE, {"format": "pt"})
    report = ckptmap.convert(tmp_path / "work", tmp_path / "back", as_=tmp_path / "release")
    assert report.fidelity["codes"] == 7, report
    given, got = load_file(tmp_path / "work" / FILE), load_file(tmp_path / "back" / FILE)
    for key, tensor in given.items():
        if key.endswith("weight_packed"):
            assert torch.equal(tensor, got[key]), key
        elif key.endswith("weight_scale"):
            assert torch.equal(tensor.to(torch.float16), got[key]), key
    assert ckptmap.verify(tmp_path / "back", against=tmp_path / "work").ok


def test_several_shards_keep_their_names_and_order(tmp_path: Path) -> None:
    """The release of a writer that cut it otherwise than ckptmap would."""
    tiny_llama().save_pretrained(tmp_path / "release", max_shard_size="60KB")
    ckptmap.convert(tmp_path / "release", tmp_path / "work", to="fsdp2", world_size=2)
    ckptmap.convert(tmp_path / "work", tmp_path / "back", as_=tmp_path / "release")
    assert len(list((tmp_path / "release").glob("*.safetensors"))) > 2
    assert contents(tmp_path / "back") == contents(tmp_path / "release")


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file, but for our own."""
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name != "ckptmap.manifest.json"
    }


def indexed(path: Path, **metadata: object) -> bytes:
    """Write another index of the same shards, as another program would; return its text."""
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["metadata"] |= metadata
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    file.write_text(json.dumps(index))
    return file.read_bytes()


def test_an_index_of_another_program_comes_back_where_it_is_true(tmp_path: Path) -> None:
    """The order of its keys, its indentation and what it tells besides."""
    name, release = "model.safetensors.index.json", tmp_path / "release"
    tiny_llama().save_pretrained(release, max_shard_size="60KB")
    ckptmap.convert(release, tmp_path / "work.pt", to="full")
    text = indexed(release, total_parameters=1, note="\u2603")
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "same", as_=release)
    assert (tmp_path / "same" / name).read_bytes() == text
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "part", as_=release, exclude=NORM)
    listed = json.loads((tmp_path / "part" / name).read_text())
    assert NORM not in listed["weight_map"] and "note" not in listed["metadata"]
    untrue = indexed(release, total_size=8)
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "true", as_=release)
    assert (tmp_path / "true" / name).read_bytes() != untrue


STATED = {
    "recipe.yaml": b"default_stage: {}\n", "quantize_config.json": b'{"bits": 4}', "quant_config.json": b"{}",
    "quantization_config.json": b"{}", "quanto_qmap.json": b"{}",
}  # fmt: skip
TOKENIZER = {
    "generation_config.json": b'{"eos_token_id":1}',
    "tokenizer.json": b'{"version": "1.0"}\r\n',
    "tokenizer_config.json": b'{ "chat_template": "\xe2\x98\x83" }',
    "chat_template.jinja": b"{{ messages }}",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_file_of_a_release_in_shards_comes_back(
    form: str, releases: Callable[[str], Path], tmp_path: Path
) -> None:
    """The shards are cut as `save_pretrained` cuts them; the tokenizer's files are made up."""
    release = sharded(releases(form), tmp_path / "release")
    for name, content in {**TOKENIZER, **STATED}.items():
        (release / name).write_bytes(content)
    ckptmap.convert(release, tmp_path / "work", to="fsdp2-bf16", world_size=2)
    ckptmap.convert(tmp_path / "work", tmp_path / "back", as_=release)
    assert contents(tmp_path / "back").keys() == contents(release).keys()
    for name, content in contents(release).items():
        if form in ("torchao", "nf4") and name.endswith(".safetensors"):
            continue  # torchao's JSON names the parts in another order; this copy repeats our records
        assert (tmp_path / "back" / name).read_bytes() == content, name


def test_files_that_state_a_form_go_with_weights_of_that_form(
    releases: Callable[[str], Path], tmp_path: Path
) -> None:
    release = shutil.copytree(releases("ct-int4"), tmp_path / "release")
    for name, content in STATED.items():
        (release / name).write_bytes(content)
    copy = ckptmap.convert(release, tmp_path / "copy", to="hf")
    assert contents(tmp_path / "copy").keys() == contents(release).keys()
    assert not copy.notes
    values = ckptmap.convert(release, tmp_path / "values", to="hf-bf16")
    assert not STATED.keys() & contents(tmp_path / "values").keys()
    assert [note.split()[0] for note in values.notes] == list(STATED)
    ckptmap.convert(tmp_path / "values", tmp_path / "work", to="fsdp2", world_size=2)
    ckptmap.convert(tmp_path / "work", tmp_path / "out", to="hf", config_from=release)
    assert not STATED.keys() & contents(tmp_path / "out").keys()


def sharded(source: Path, to: Path) -> Path:
    """A copy of a release in shards, as huggingface_hub cuts it for `save_pretrained`."""
    from huggingface_hub import split_torch_state_dict_into_shards

    shutil.copytree(source, to)
    file = weights_file(to)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    file.unlink()
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=f"{file.stem}{{suffix}}.safetensors", max_shard_size="20KB"
    )
    for name, keys in split.filename_to_tensors.items():
        save_file({key: tensors[key] for key in keys}, to / name, metadata)
    about = {"total_parameters": len(tensors), **split.metadata}
    index = {"metadata": about, "weight_map": split.tensor_to_filename}
    (to / f"{file.stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    assert len(list(to.glob("*.safetensors"))) > 1
    return to


# ------------------------------------------------------------------------------- like a plain one


def module_file(path: Path) -> None:
    state = tiny_llama().state_dict()
    torch.save({"model": {f"module.{key}": tensor for key, tensor in state.items()}}, path)


def fp16_file(path: Path) -> None:
    torch.save(tiny_llama(dtype=torch.float16).state_dict(), path)


def compiled_layers(path: Path) -> None:
    state = tiny_llama().state_dict()
    torch.save({k.replace("layers.0.", "layers.0._orig_mod."): t for k, t in state.items()}, path)


@pytest.mark.parametrize("make", [module_file, fp16_file, compiled_layers])
def test_like_a_file_of_torch_save(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "like.pt")
    tiny_llama(dtype=torch.float32).save_pretrained(tmp_path / "work")
    report = ckptmap.convert(tmp_path / "work", tmp_path / "out.pt", as_=tmp_path / "like.pt")
    wanted, got = torch.load(tmp_path / "like.pt"), torch.load(tmp_path / "out.pt")
    assert wanted.keys() == got.keys()
    for a, b in ((wanted, got),) if "model" not in wanted else ((wanted["model"], got["model"]),):
        assert {k: (t.dtype, t.shape) for k, t in a.items()} == {
            k: (t.dtype, t.shape) for k, t in b.items()
        }
    assert report.likeness is not None and set(report.likeness.changed.values()) == {"cast"}
    assert ckptmap.verify(tmp_path / "out.pt", against=tmp_path / "work").ok


def test_like_a_directory_of_fsdp2(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    ckptmap.convert(tmp_path / "base", tmp_path / "like", to="fsdp2", world_size=4, root="app/net")
    report = ckptmap.convert(tmp_path / "base", tmp_path / "out", as_=tmp_path / "like")
    assert report.likeness is not None and not report.likeness.changed
    assert ckptmap.diff(tmp_path / "like", tmp_path / "out", values=True).same
    with ckptmap.open(tmp_path / "out") as out:
        assert (out.world_size, out.roles.model_root) == (4, ("app", "net"))


# ------------------------------------------------------------------------------- refused


@pytest.fixture
def pair(releases: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A low-bit release, and a file of its values."""
    shutil.copytree(releases("ct-int4"), tmp_path / "release")
    ckptmap.convert(tmp_path / "release", tmp_path / "work.pt", to="full-bf16")
    return tmp_path / "release", tmp_path / "work.pt"


def renamed(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.other.weight"] = state.pop(QUERY)


OTHER_MODELS: Mapping[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "one less": (lambda state: state.pop(NORM), rf"work.pt lacks {NORM}"),
    "one more": (lambda state: state.update(extra=torch.ones(2)), r"release lacks extra"),
    "other names": (renamed, rf"lacks {QUERY}; .*release lacks model.*other"),
    "other shape": (
        lambda state: state.update({QUERY: state[QUERY][:32].clone()}),
        rf"{QUERY}: \[32, 64\] in .*, expected \[64, 64\] as in",
    ),
    "integers": (lambda state: state.update({NORM: state[NORM].int()}), rf"{NORM}: int32 in .*bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    release, work = pair
    change, message = OTHER_MODELS[name]
    edited(work, change)
    with pytest.raises(PlanError, match=message) as refused:
        ckptmap.convert(work, tmp_path / "out", as_=release)
    assert refused.value.code == "CKM212"
    assert not (tmp_path / "out").exists()


def test_what_the_reference_decides_is_no_option(pair: tuple[Path, Path], tmp_path: Path) -> None:
    release, work = pair
    for keywords in ({"to": "hf"}, {"names": "hf"}, {"encode": "*"}, {"wrap": "ddp"}):
        given: Any = keywords
        with pytest.raises(ArgumentError, match=next(iter(keywords))):
            ckptmap.convert(work, tmp_path / "out", as_=release, **given)


def test_the_destination_is_neither_of_the_two(pair: tuple[Path, Path]) -> None:
    release, work = pair
    for dst in (release, release / "inside", work):
        with pytest.raises(DestinationError):
            ckptmap.convert(work, dst, as_=release, overwrite=True)
    assert ckptmap.open(release)[QUERY].encoding == "ct-int4", "it is as it was"


def test_bits_are_compared_not_values(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """-0.0 is not 0.0, and a NaN is the same NaN alone."""
    release, _ = pair
    tensors = load_file(release / FILE)
    tensors[NORM][:2] = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    tensors["model.layers.0.input_layernorm.weight"][0] = 0.0
    save_file(tensors, release / FILE, {"format": "pt"})
    ckptmap.convert(release, tmp_path / "nan.pt", to="full-bf16")
    report = ckptmap.convert(tmp_path / "nan.pt", tmp_path / "same", as_=release)
    assert report.likeness is not None and not report.likeness.changed

    def change(state: dict[str, torch.Tensor]) -> None:
        state[NORM][0] = state[NORM][1].clone()
        state["model.layers.0.input_layernorm.weight"][0] = -0.0

    edited(tmp_path / "nan.pt", change)
    report = ckptmap.convert(tmp_path / "nan.pt", tmp_path / "back", as_=release)
    assert report.likeness is not None
    assert report.likeness.changed == {
        NORM: "bytes", "model.layers.0.input_layernorm.weight": "bytes"
    }  # fmt: skip


@pytest.mark.parametrize("form", ["ct-int4", "bnb-nf4", "ct-fp8", "bnb-int8"])
def test_a_trained_weight_that_no_code_can_hold(
    form: str, releases: Callable[[str], Path], tmp_path: Path
) -> None:
    """The hint names no option that `--as` refuses."""
    ckptmap.convert(releases(form), tmp_path / "work.pt", to="full-bf16")
    edited(tmp_path / "work.pt", lambda state: state[QUERY].__setitem__((4, 5), torch.nan))
    with pytest.raises(CkptmapError, match=f"^{QUERY}: .*finite values") as caught:
        ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=releases(form))
    assert "--no-encode" not in caught.value.hint and "--to hf-bf16" in caught.value.hint
    assert not (tmp_path / "back").exists()


def test_a_damaged_reference_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The reference was written by ckptmap, so that its manifest states digests."""
    release, work = pair
    ckptmap.convert(work, tmp_path / "like.pt", to="full")
    ckptmap.convert(release, tmp_path / "given", to="hf")
    file = tmp_path / "given" / FILE
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(SourceError) as refused:
        ckptmap.convert(work, tmp_path / "out", as_=tmp_path / "given")
    assert refused.value.code == "CKM105", refused.value
    assert not (tmp_path / "out").exists()


def test_a_tied_head_that_no_file_holds(tmp_path: Path) -> None:
    tiny_llama(tied=True).save_pretrained(tmp_path / "release")
    torch.save(tiny_llama(tied=True).state_dict(), tmp_path / "work.pt")
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=tmp_path / "release")
    assert report.likeness is not None and not report.likeness.changed
    same = (tmp_path / "back" / FILE).read_bytes() == (tmp_path / "release" / FILE).read_bytes()
    assert same
    edited(tmp_path / "work.pt", noisy("lm_head.weight"))
    with pytest.raises(CkptmapError, match="tied"):
        ckptmap.convert(tmp_path / "work.pt", tmp_path / "other", as_=tmp_path / "release")


@pytest.mark.parametrize("form", ["dense", "bnb-nf4"])
def test_a_tied_head_that_only_the_release_holds(form: str, tmp_path: Path) -> None:
    """Quantizers write it beside the embedding, and transformers saves the trained model without it."""
    release, dense_, head = tmp_path / "release", tmp_path / "dense", "lm_head.weight"
    model = tiny_llama(tied=True)
    model.save_pretrained(dense_)
    if form == "dense":
        shutil.copytree(dense_, release)
    else:
        bnb_cases.quantized(dense_, "nf4", False).save_pretrained(release)
    state = load_file(release / FILE)
    state[head] = state["model.embed_tokens.weight"].clone()
    save_file(state, release / FILE, {"format": "pt"})
    ckptmap.load(release, model)
    model.save_pretrained(tmp_path / "work")
    assert head not in load_file(tmp_path / "work" / FILE)
    report = ckptmap.convert(tmp_path / "work", tmp_path / "back", as_=release)
    assert report.likeness is not None and not report.likeness.changed
    assert (tmp_path / "back" / FILE).read_bytes() == (release / FILE).read_bytes()
    assert ckptmap.verify(tmp_path / "back", against=tmp_path / "work").ok
    with torch.no_grad():
        model.model.embed_tokens.weight[3] += 1
    model.save_pretrained(tmp_path / "trained")
    report = ckptmap.convert(tmp_path / "trained", tmp_path / "other", as_=release)
    assert report.likeness is not None
    assert report.likeness.changed.keys() == {head, "model.embed_tokens.weight"}
    written = load_file(tmp_path / "other" / FILE)
    for key in (head, "model.embed_tokens.weight"):
        assert torch.equal(written[key], model.model.embed_tokens.weight)
    assert ckptmap.verify(tmp_path / "other", against=tmp_path / "trained").ok


def test_a_checkpoint_that_nobody_writes_is_no_reference(pair: tuple[Path, Path]) -> None:
    """One file of safetensors is read, and written by no setup."""
    release, work = pair
    with pytest.raises(
        PlanError, match=r"is safetensors, which ckptmap reads and does not write"
    ) as refused:
        ckptmap.plan(work, as_=release / FILE)
    assert refused.value.code == "CKM201"


# ------------------------------------------------------------------------------- plan and command


def test_a_plan_says_what_will_be_compared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    release, work = pair
    plan = ckptmap.plan(work, as_=release)
    assert "12 weights will be compared with" in str(plan)
    plan.save(tmp_path / "plan.json")
    report = plan.execute(tmp_path / "out")
    assert report.likeness is not None
    assert report.to_json()["as"]["identical"] == report.likeness.weights  # type: ignore[index]
    again = ckptmap.convert(work, tmp_path / "out", as_=release)
    assert "was complete already" in again.notes
