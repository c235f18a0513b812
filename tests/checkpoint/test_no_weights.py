"""Files that hold modules, arrays or empty parameters in place of tensors: one line, and a command that works when pasted."""

from __future__ import annotations

import argparse
import pickle
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import SourceError


def refusal(path: Path) -> SourceError:
    with pytest.raises(SourceError) as caught:
        ckptmap.open(path)
    return caught.value


def run_hint(path: Path) -> ckptmap.Checkpoint:
    """Run the command that the refusal of a file names, and open what it wrote."""
    program, option, code = shlex.split(refusal(path).hint.partition(": ")[2])
    assert (program, option) == ("python", "-c")
    exec(code, {})  # in this process: another one would import torch for seconds
    return ckptmap.open(path.with_name(f"{path.stem}.new{path.suffix}"))


@pytest.mark.parametrize(
    "tree",
    [
        lambda net: net,
        lambda net: {
            "epoch": 3,
            "model": None,
            "ema": net,
            "train_args": {},
        },  # as ultralytics saves
        torch.fx.symbolic_trace,
    ],
    ids=["module", "beside_values", "traced"],
)
def test_the_tensors_of_a_module_are_saved(
    tree: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save(tree(net), tmp_path / "whole model.pt")
    with run_hint(tmp_path / "whole model.pt") as ckpt:
        assert {fqn: ckpt[fqn][...].tolist() for fqn in ckpt} == {
            fqn: tensor.tolist() for fqn, tensor in net.state_dict().items()
        }


@pytest.mark.parametrize("protocol", [2, 5])
def test_numpy_arrays_become_tensors(protocol: int, tmp_path: Path) -> None:
    arrays = {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(2, "f2")}
    torch.save({"model": arrays, "epoch": 3}, tmp_path / "a.pth", pickle_protocol=protocol)
    assert "numpy arrays in place of tensors" in refusal(tmp_path / "a.pth").message
    with run_hint(tmp_path / "a.pth") as ckpt:
        assert ckpt.extra == {"epoch": 3}
        for name, array in arrays.items():
            assert np.array_equal(ckpt[name][...].numpy(), array)


def test_an_array_beside_weights_is_named(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "rng": np.random.get_state()}, tmp_path / "a.pt")
    with ckptmap.open(tmp_path / "a.pt") as ckpt:
        (refused,) = ckpt.refused
    assert (refused.key, refused.reason.partition(",")[0]) == ("rng", "a numpy array")


def test_lazy_parameters_are_no_weights_yet(tmp_path: Path) -> None:
    torch.save(nn.LazyLinear(4).state_dict(), tmp_path / "a.pt")
    error = refusal(tmp_path / "a.pt")
    assert "lazy modules" in error.message and "run one batch" in error.hint


def test_devices_and_dtypes_are_shown_as_torch_names_them(tmp_path: Path) -> None:
    values = {"dtype": torch.bfloat16, "device": torch.device("cuda:1")}
    torch.save({"model": {"w": torch.ones(2)}, **values}, tmp_path / "a.pt")
    with ckptmap.open(tmp_path / "a.pt") as ckpt:
        assert repr(ckpt.extra) == "{'dtype': torch.bfloat16, 'device': device('cuda:1')}"


def test_an_archive_of_torch_package_is_none_that_an_error_ended(tmp_path: Path) -> None:
    from torch.package import PackageExporter

    with PackageExporter(tmp_path / "a.pt") as archive:
        archive.extern("**")
        archive.save_pickle("net", "net.pkl", nn.Linear(2, 2))
    error = refusal(tmp_path / "a.pt")
    assert "torch.package" in error.message and "PackageImporter" in error.hint


@pytest.mark.parametrize("protocol", [0, 1])
def test_pickles_of_python_2_are_no_text(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"w": np.ones(2)}, protocol=protocol))
    assert "a bare pickle" in refusal(tmp_path / "a.pkl").message


def test_a_packed_tar_of_any_name_is_unpacked(tmp_path: Path) -> None:
    """NeMo's models are tar archives; older ones are packed with gzip."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model_weights.ckpt")
    with tarfile.open(tmp_path / "m.nemo", "w:gz") as archive:
        archive.add(tmp_path / "model_weights.ckpt", "unpacked.ckpt")
    command = shlex.split(refusal(tmp_path / "m.nemo").hint.partition(": ")[2])
    subprocess.run(command, check=True, cwd=tmp_path)
    with ckptmap.open(tmp_path / "unpacked.ckpt") as ckpt:
        assert list(ckpt) == ["w"]


def test_a_packed_file_of_another_name_is_unpacked(tmp_path: Path) -> None:
    import gzip

    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "b c.bin").write_bytes(gzip.compress((tmp_path / "a.pt").read_bytes()))
    command = refusal(tmp_path / "b c.bin").hint.partition(": ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    with ckptmap.open(tmp_path / "b c.bin.unpacked") as ckpt:
        assert list(ckpt) == ["w"]


@pytest.mark.parametrize("above", [False, True], ids=["directory", "run"])
def test_a_megatron_save_that_did_not_finish(above: bool, tmp_path: Path) -> None:
    """Megatron core writes common.pt first. This one is an imitation: its values are those that Megatron keeps there."""
    folder = tmp_path / "run" / "iter_0000003"
    folder.mkdir(parents=True)
    torch.save({"iteration": 3, "args": argparse.Namespace(lr=1.0)}, folder / "common.pt")
    error = refusal(folder.parent if above else folder)
    assert "iter_0000003: is the directory of a Megatron save" in error.message
    assert error.hint == "use an earlier checkpoint"
