"""A damaged checkpoint of DeepSpeed is refused: no byte of it becomes a weight that training did not make."""

from __future__ import annotations

import shlex
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from ckptmap_cli.main import main

import ckptmap
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.formats.torch_save.reader import load
from ckptmap.storage.files import Files
from tests.golden import truth
from tests.support.zero_files import write_zero

Break = Callable[[Path], object]
RANK = "{}zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def rank(step: Path, number: int) -> Path:
    (found,) = step.glob(RANK.format("*", number))
    return found


def step_of(samples: Path, name: str, out: Path) -> Path:
    run = shutil.copytree(samples / name, out / name)
    return run / "global_step3"


def swap(a: Path, b: Path) -> None:
    third = a.with_suffix(".third")
    a.rename(third)
    b.rename(a)
    third.rename(b)


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def rewritten(file: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change what a file holds, and save it under its name again."""
    tree = torch.load(file, weights_only=False) if "model" in file.name else None
    assert tree is not None, "only the model's file holds no class of DeepSpeed"
    change(tree)
    torch.save(tree, file)


BROKEN: list[tuple[str, str, Break, str]] = [
    ("missing rank", "z2w3", lambda s: rank(s, 1).unlink(), r"rank 1 of 3 is missing \(zero_pp_rank_1_mp"),
    ("missing last rank", "z2w3", lambda s: rank(s, 2).unlink(), r"rank 2 of 3 is missing \(zero_pp_rank_2_mp"),
    ("missing first rank", "z1w2", lambda s: rank(s, 0).unlink(), r"rank 0 of 2 is missing \(zero_pp_rank_0_mp"),
    ("missing bf16 rank", "z2w2", lambda s: rank(s, 1).unlink(), r"rank 1 of 2 is missing \(bf16_zero_pp_rank_1"),
    ("missing rank of stage 3", "z3w3", lambda s: rank(s, 2).unlink(), r"rank 2 of 3 is missing"),
    ("missing model", "z2w2", lambda s: (s / "mp_rank_00_model_states.pt").unlink(), "has no mp_rank_00_model"),
    ("missing model of stage 3", "z3w3", lambda s: (s / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
     r"rank 1 of 3 is missing \(zero_pp_rank_1_mp_rank_00_model_states.pt\)"),
    ("swapped", "z3w2", lambda s: swap(rank(s, 0), rank(s, 1)), "was saved as the file of rank 1"),
    ("truncated", "z2w2", lambda s: cut(rank(s, 1)), "truncated"),
    ("empty", "z2w2", lambda s: rank(s, 1).write_bytes(b""), "expected a zip archive, found 0 bytes|is empty"),
    ("extra rank", "z2w2", lambda s: shutil.copy(rank(s, 1), s / rank(s, 1).name.replace("_1_mp", "_2_mp")),
     "was saved as the file of rank 1"),
    ("ranks of two dtypes", "z2w2", lambda s: shutil.copy(rank(s, 1), s / rank(s, 1).name.removeprefix("bf16_")),
     "is of rank 1, as .* is"),
    ("tensor parallel", "z2w2", lambda s: shutil.copy(s / "mp_rank_00_model_states.pt", s / "mp_rank_01_model_states.pt"),
     "mp_rank_01_model_states.pt holds a part of the model"),
    ("pipeline", "z2w2", lambda s: (s / "layer_00-model_00-model_states.pt").touch(), "holds a layer of a pipeline"),
    ("experts", "z2w2", lambda s: (s / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(), "holds an expert"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "break_it", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_refused(samples: Path, tmp_path: Path, run: str, break_it: Break, message: str) -> None:
    step = step_of(samples, run, tmp_path)
    break_it(step)
    for path in (step, step.parent):
        with pytest.raises(SourceError, match=message) as raised:
            ckptmap.open(path)
        assert raised.value.hint


MIXED = [("z2w2", "z2-offload", 1), ("z2w3", "z2-momentum", 2), ("z1w2", "z1-sgd", 0), ("z3w2", "z3-adagrad", 1),
         ("z3w3", "z3-sub-groups", 0), ("z2w3", "z2w2", 1), ("z1-bf16-optimizer", "z2w2", 1)]  # fmt: skip


@pytest.mark.parametrize(("run", "other", "number"), MIXED)
def test_a_file_of_another_save_is_refused(
    samples: Path, tmp_path: Path, run: str, other: str, number: int
) -> None:
    """Another model, another optimizer, another number of ranks: what the files say contradicts itself."""
    step = step_of(samples, run, tmp_path)
    theirs = rank(samples / other / "global_step3", number)
    shutil.copy(theirs, rank(step, number))
    with pytest.raises(SourceError, match=r"is of|holds|has|differ"):
        ckptmap.open(step)


def test_swapped_ranks_are_found_by_what_they_hold(samples: Path, tmp_path: Path) -> None:
    """Whatever saved them again: with no name in the zip, the fragments that a rank states tell."""
    step = step_of(samples, "z2w3", tmp_path)
    names = [rank(step, number) for number in (0, 1)]
    swap(*names)
    for file in names:
        data = file.read_bytes()
        for number in (0, 1):
            root = f"zero_pp_rank_{number}_mp_rank_00_optim_states".encode()
            data = data.replace(root, b"a" * len(root))
        file.write_bytes(data)
    with pytest.raises(SourceError, match=r"param_slice_mappings has .* of .*, expected"):
        ckptmap.open(step)


def test_another_step_of_the_model_is_found(samples: Path, tmp_path: Path) -> None:
    step = step_of(samples, "z3w2", tmp_path)

    def later(tree: dict[str, object]) -> None:
        tree["global_steps"] = 4

    rewritten(step / "zero_pp_rank_1_mp_rank_00_model_states.pt", later)
    with pytest.raises(SourceError, match="has global_steps 4"):
        ckptmap.open(step)


@pytest.mark.parametrize("name", ["z2w2", "z3w2"])
def test_a_flipped_bit_of_a_weight_is_found(samples: Path, tmp_path: Path, name: str) -> None:
    step = step_of(samples, name, tmp_path)
    with ckptmap.open(step) as ckpt:
        (chunk, *_) = ckpt.group("inner.0.weight").parts[""].chunks
    file = Path(chunk.region.file)
    data = bytearray(file.read_bytes())
    data[chunk.region.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(CkptmapError, match="CRC"):
        ckptmap.convert(step, tmp_path / "out.pt", to="full")
    assert not (tmp_path / "out.pt").exists()


def with_member(file: Path, member: str, content: bytes) -> None:
    """Replace a member of a zip, whose checksum is then that of the new content."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = [name for name in members if name.endswith(f"/{member}")]
    with zipfile.ZipFile(file, "w") as archive:
        for one, old in members.items():
            archive.writestr(one, content if one == name else old)


@pytest.mark.parametrize("name", ["z1w2", "z3w2"])
def test_ranks_of_two_steps_are_found_when_their_counts_are_compared(
    samples: Path, tmp_path: Path, name: str
) -> None:
    """The file of a rank does not say its step, but its optimizer counts it."""
    step = step_of(samples, name, tmp_path)
    loaded = load(Files(), str(rank(step, 1))).tree["optimizer_state_dict"]
    state = loaded.get("base_optimizer_state", loaded.get("optimizer_state_dict"))["state"][0]
    with_member(rank(step, 1), f"data/{state['step'].key}", struct.pack("<f", 2.0))
    with pytest.raises(CkptmapError, match=r"step.*(2\.0|differ)"):
        ckptmap.convert(step, tmp_path / "out.pt", to="full")
    assert not (tmp_path / "out.pt").exists()


def test_the_command_of_a_hint_names_the_directory(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = step_of(samples, "z2w2", tmp_path / "it's a run")
    assert main(["inspect", str(rank(step, 0))]) == 2
    command = capsys.readouterr().err.partition("directory: ")[2].strip()
    assert shlex.split(command) == [str(step)]
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")
    assert main(["inspect", str(step)]) == 2
    command = capsys.readouterr().err.rpartition(": python ")[2].strip()
    assert shlex.split(command)[-4:] == [
        "--input_folder",
        str(step),
        "--output_folder",
        f"{step}_universal",
    ]


KINDS = ("byte", "cut", "gone", "pickle", "swap")


def damaged(step: Path, kind: str, random: Random) -> None:
    files = sorted(step.rglob("*.pt"))
    file, other = random.choice(files), random.choice(files)
    data = bytearray(file.read_bytes())
    if kind == "gone":
        file.unlink()
    elif kind == "swap":
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "cut":
        file.write_bytes(data[: random.randrange(len(data))])
    elif kind == "byte":
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        file.write_bytes(data)
    else:
        with zipfile.ZipFile(file) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            pickle = bytearray(archive.read(name))
        pickle[random.randrange(len(pickle))] = random.randrange(256)
        with_member(file, "data.pkl", bytes(pickle))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["z1w3", "z2-round-robin", "z3-sub-groups", "z1-universal", "z3-universal"]
)
def test_no_damage_is_an_internal_error(
    samples: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """It is refused, or what is read is what was saved."""
    random = Random(f"{name} {kind}")
    expected = truth.weights(samples / name)
    for number in range(8):
        run = shutil.copytree(samples / name, tmp_path / str(number))
        (step,) = [path for path in run.iterdir() if path.is_dir()]
        damaged(step, kind, random)
        try:
            with ckptmap.open(step) as ckpt:
                list(ckpt.plain)
                moments = [lazy for state in ckpt.optimizer.values() for lazy in state.values()]
                read = {name: ckpt[name].read() for name in ckpt}
                assert all(lazy.read() is not None for lazy in moments)
        except CkptmapError as error:
            assert error.code and str(error)
            continue
        if kind in ("cut", "gone", "swap"):
            assert all(read[name].to(value.dtype).equal(value) for name, value in expected.items())


def test_experts_over_ranks_of_their_own_are_refused(tmp_path: Path) -> None:
    step = write_zero(tmp_path / "step", {"w": torch.ones(6)}, 2)
    rewritten_partition = torch.load(rank(step, 1), weights_only=True)
    rewritten_partition["optimizer_state_dict"]["ds_zero_partition_groups"] = [{"sub_group": 0}]
    torch.save(rewritten_partition, rank(step, 1))
    with pytest.raises(SourceError, match=r"expert parallel") as raised:
        ckptmap.open(step)
    assert "ds_to_universal" in raised.value.hint


def test_vectors_that_were_offloaded_to_nvme_are_refused(tmp_path: Path) -> None:
    """Their files hold no weights: DeepSpeed copies its swap files beside them."""
    step = tmp_path / "step"
    step.mkdir()
    for number in (0, 1):
        model = {"module": {"w": torch.empty(0)}, "param_shapes": [{"w": torch.Size((5,))}]}
        torch.save(model, step / f"zero_pp_rank_{number}_mp_rank_00_model_states.pt")
        held = {"fp32_flat_groups": [torch.empty(0)], "partition_count": 2}
        held["optimizer_state_dict"] = {"state": {}, "param_groups": [{"params": [0]}]}
        torch.save({"optimizer_state_dict": held}, step / RANK.format("", number))
    with pytest.raises(
        SourceError, match=r"fp32_flat_groups holds \[0\] elements, expected \[3\]"
    ) as raised:
        ckptmap.open(step)
    assert "offloaded to NVMe" in raised.value.hint
