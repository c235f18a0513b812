"""Every adapter of the registry passes the conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from ckptmap import registry
from ckptmap.formats.detect import look
from ckptmap.formats.rank_files.reader import RankFiles
from ckptmap.formats.rank_files.writer import RankFilesWriter
from ckptmap.optim.state import KeyForm, expanded, key_forms
from ckptmap.protocols import Layout, OutState, OutTensor
from ckptmap.sharding.device_mesh import Mesh
from ckptmap.tensors import Leaf, Opaque, PerRank, TensorInfo
from ckptmap.testing import (
    ContainerKit,
    ReaderKit,
    SchemeKit,
    check_directory,
    check_key_form,
    check_layout,
)
from ckptmap.testing.images import image
from ckptmap.testing.key_forms import plain
from ckptmap.testing.parts import stored
from ckptmap.testing.samples import bits
from tests.golden.deepspeed.make_deepspeed import unpack
from tests.support.gguf_files import write as write_gguf
from tests.support.mapping_state import state_of
from tests.support.parallel_writers import (
    LLAMA_PARAMS,
    Grid,
    write_megatron,
    write_meta,
    write_torch_dist,
)
from tests.support.zero_files import write_zero

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

READERS = {
    found.name: found
    for specs in (registry.CONTAINERS, registry.DIRECTORIES)
    for found in (registry._load(known.spec) for known in specs)
}
UNORDERED = "fsdp1-local"
"""Takes no source whose names are sorted, as the kit's are: tests/formats/rank_files/test_fsdp1_local_writer.py."""
READ_BY = {"accelerate-full": "accelerate"}
"""Writers of one framework's directory in several forms, which one reader reads."""
SETUPS = {setup.name: setup for setup in registry.setups() if setup.name != UNORDERED}


# ------------------------------------------------------------------------------- containers


def cases(adapters: Iterable[str], checks: Iterable[str]) -> list[tuple[str, str]]:
    """Every adapter with every check."""
    return list(product(adapters, checks))


@pytest.mark.parametrize(("name", "check"), cases(SETUPS, ContainerKit.CHECKS))
def test_container(name: str, check: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    reader = READERS[READ_BY.get(setup.writer, setup.writer)]
    kit = ContainerKit(reader, registry.writer(setup.writer), setup, tmp_path)
    getattr(kit, check)()


def plain_tensors() -> dict[str, torch.Tensor]:
    shapes = ((), (0,), (3, 0), (7,), (5, 3), (2, 3, 4))
    return {
        f"{dtype}.größe.{number}": bits(shape, dtype, number)
        for dtype in ("float32", "bfloat16", "int64", "bool")
        for number, shape in enumerate(shapes)
    }


def save_safetensors(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(tensors, folder / "some.safetensors")
    return folder / "some.safetensors"


def save_bins(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    (folder / "bins").mkdir()
    save_torch_state_dict(tensors, folder / "bins", safe_serialization=False, max_shard_size=150)
    return folder / "bins"


def save_consolidated(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    return write_meta(folder / "meta", tensors, 2, LLAMA_PARAMS)


def save_megatron(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    return write_megatron(folder / "megatron", tensors, Grid(2, (1, 1)))


def save_torch_dist(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    return write_torch_dist(folder / "dist", tensors)


def save_gguf(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """Leave in `tensors` what GGUF and numpy can hold, and write that."""
    kinds = {torch.float32: "F32", torch.int64: "I64"}
    for name in [name for name, tensor in tensors.items() if tensor.dtype not in kinds]:
        del tensors[name]
    held = {name: (kinds[tensor.dtype], tensor.numpy()) for name, tensor in tensors.items()}
    return write_gguf(folder / "some.gguf", held)


def save_torch_checkpointing(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    pytest.importorskip("torch_checkpointing")
    from tests.ranks.torch_checkpointing_saves import manager

    manager({}).save(str(folder / "step-1"), {"model": tensors, "step": 1})
    return folder / "step-1"


def save_zero(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    return write_zero(folder / "zero", tensors, 3)


ONLY_READ = {
    "torch-checkpointing": save_torch_checkpointing,
    "gguf": save_gguf,
    "safetensors": save_safetensors,
    "hf-bin": save_bins,
    "consolidated": save_consolidated,
    "megatron": save_megatron,
    "torch_dist": save_torch_dist,
    "zero-step": save_zero,
}
"""Formats that are not written here -> who writes them."""
KNOWN = {"consolidated": "meta", "megatron": "megatron", "torch_dist": "megatron"}
"""Formats that hold tensors of known names only -> the naming scheme of these."""


@pytest.mark.parametrize(("name", "check"), cases(ONLY_READ, ReaderKit.CHECKS))
def test_reader(name: str, check: str, tmp_path: Path) -> None:
    tensors = state_of("llama", KNOWN[name]) if name in KNOWN else plain_tensors()
    path = ONLY_READ[name](tensors, tmp_path)
    getattr(ReaderKit(READERS[name], path, tensors, tmp_path / "kit"), check)()


# ------------------------------------------------------------------------------- layouts


def dtensors(info: TensorInfo, world_size: int, folder: Path) -> Sequence[Leaf]:
    """What rank files hold of a tensor, as their reader gives it; nothing where it is plain."""
    mesh = Mesh((("", world_size),))
    placement = mesh.placement("fc.weight", info, whole=False)
    if placement.shards is None:
        return ()
    tensor = OutTensor(("fc.weight",), info, mesh.chunks(placement, info), placement=placement)
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    values = {("fc.weight",): torch.zeros(info.shape)}
    for out in RankFilesWriter().files(OutState([tensor], world_size=world_size), ""):
        (folder / out.name).write_bytes(image(out, values))
    leaf = RankFiles().index(look(folder)).leaves["fc.weight",]
    return leaf.values if isinstance(leaf, PerRank) else [leaf]


def sharded_tensors(info: TensorInfo, world_size: int) -> Sequence[Leaf]:
    """As `ShardedTensor.__getstate__` gives them: every rank lists all shards and holds its own."""
    module = "torch.distributed._shard.sharded_tensor"
    cut = registry.layout("shard0").cut(info, world_size)
    listed = {
        rank: Opaque("m", "ShardMetadata", (), {"shard_offsets": b.offsets, "shard_sizes": b.sizes})
        for rank, b in cut
    }
    whole = Opaque(module, "ShardedTensorMetadata", (), {"shards_metadata": list(listed.values())})
    values = []
    for rank in range(world_size):
        held = [
            Opaque("m", "Shard", (), {"tensor": stored(TensorInfo(b.sizes, info.dtype)), "metadata": listed[r]})
            for r, b in cut
            if r == rank
        ]  # fmt: skip
        group = Opaque("m", "State", (), {"global_rank": rank, "global_world_size": world_size})
        values.append(Opaque(f"{module}.api", "ShardedTensor", (), (held, whole, group), info))
    return values


@pytest.mark.parametrize("layout", registry.layouts(), ids=lambda layout: layout.name)
def test_layout(layout: Layout, tmp_path: Path) -> None:
    parts: Any = {
        "dtensor": lambda info, world_size: dtensors(info, world_size, tmp_path / "ranks"),
        "sharded-tensor": sharded_tensors,
    }
    check_layout(layout, parts.get(layout.name))


# ------------------------------------------------------------------------------- key forms


@pytest.mark.parametrize("form", key_forms(), ids=lambda form: form.name)
def test_key_form(form: KeyForm) -> None:
    """It passes, and no form that is asked before it takes what it writes."""
    check_key_form(form)
    leaves = expanded(dict(form.write(plain())))
    claims = [other.name for other in key_forms() if other.read(leaves) is not None]
    assert claims[0] == form.name


# ------------------------------------------------------------------------------- encodings


SCHEMES = {scheme.name: scheme for scheme in registry.schemes()}
GROUPED_BY = {
    "ct-int4": "ct-int8",
    **{name: "gguf" for name in SCHEMES if name.startswith("gguf-")},
}
"""Targets that only encode -> the scheme that finds what they wrote: one reads a whole family by its records."""


@pytest.mark.parametrize(("name", "check"), cases(SCHEMES, SchemeKit.CHECKS))
def test_scheme(name: str, check: str) -> None:
    reader = SCHEMES[GROUPED_BY.get(name, name)]
    getattr(SchemeKit(SCHEMES[name], reader), check)()


def test_targets_that_only_encode_find_nothing_themselves() -> None:
    """So that no two schemes group one tensor: each of GROUPED_BY leaves it to its reader."""
    for name in GROUPED_BY:
        for attempt in SchemeKit(SCHEMES[name]).attempts[:1]:
            lying = {
                f"w{key and '.' + key}": stored(i) for key, i in attempt.expected_parts.items()
            }
            records = {"w": attempt.encoding.record(attempt.info) or {}}
            assert SCHEMES[name].group(lying, records) == []


# ------------------------------------------------------------------------------- directories

DIRECTORIES = {
    "deepspeed": ("deepspeed", "trainer/checkpoint-2"),
    "accelerate": ("accelerate_bin_w2", ""),
    "lightning": ("lightning_w2", ""),
    "trainer": ("trainer_ddp_w2", "checkpoint-2"),
    "verl": ("verl_w2", "actor"),
}
"""Adapter -> sample and the place in it: what each framework itself has written, on two ranks."""


def test_every_reader_is_checked() -> None:
    forms = {"accelerate-full": "accelerate"}  # two forms of what one reader reads
    written = {forms.get(setup.writer, setup.writer) for setup in SETUPS.values()}
    assert written | set(ONLY_READ) | set(DIRECTORIES) == set(READERS)
    assert set(DIRECTORIES) == {registry._load(known.spec).name for known in registry.DIRECTORIES}


@pytest.fixture(scope="module")
def zero_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    unpack(folder)
    return folder


@pytest.fixture
def place_of(framework_directories: Path, zero_samples: Path) -> Callable[[str], Path]:
    """Returns where the sample of an adapter lies."""

    def place(name: str) -> Path:
        sample, inner = DIRECTORIES[name]
        return (zero_samples if name == "deepspeed" else framework_directories / sample) / inner

    return place


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directory(name: str, place_of: Callable[[str], Path]) -> None:
    check_directory(READERS[name], place_of(name))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_no_directory_claims_another(name: str, place_of: Callable[[str], Path]) -> None:
    for other in DIRECTORIES:
        claimed = READERS[name].claims(look(place_of(other)))
        assert claimed == (other == name), other
