"""The state of a rank's random generators, saved under the rank's number and restored last.

    extra.rng.rank0.cpu  u8 [5056]      torch's CPU generator
    extra.rng.rank0.cuda u8 [16]        that of the rank's current CUDA device
    extra.rng.rank0.cuda1 u8 [16]       that of another one, number 1, which the model is on, too
    extra.rng.rank0.python              random.getstate()
    extra.rng.rank0.numpy               numpy.random.get_state(legacy=False), arrays as lists

Where no recorded state fits, an optimizer that rounds stochastically gets fresh streams. Their seed
is a hash of (base, shard). The base is the recorded state of another world size, or a number that
the caller gives. The shard is this rank's coordinate along the mesh dims that cut every trained
tensor. Ranks that hold the same shard thus draw the same bits, all others independent ones.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.core.state_paths import nest
from ckptmap.errors import LoadError
from ckptmap.live.model.flat_params import FlatParamTensor
from ckptmap.live.model.live_tensor import LiveTensor, is_dtensor
from ckptmap.tensors import Path

if TYPE_CHECKING:
    from ckptmap.storage.lazy_tensor import LazyTensor

KEY = "rng"


def captured(model: object = None) -> dict[str, object]:
    """Return a copy of the state of this rank's generators: torch tensors and plain values.

    Of the generators of CUDA devices, those of the current one and of those that the model is on.
    """
    import torch

    found: dict[str, object] = {
        "cpu": torch.get_rng_state(),
        "python": _listed(random.getstate()),
        "numpy": numpy_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
        for index in sorted(_cuda_devices(model) - {torch.cuda.current_device()}):
            found[f"cuda{index}"] = torch.cuda.get_rng_state(index)
    return found


def _cuda_devices(model: object) -> set[int]:
    """Return the numbers of the CUDA devices that hold parameters or buffers."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return set()
    tensors = itertools.chain(model.parameters(), model.buffers())
    return {
        t.device.index for t in tensors if t.device.type == "cuda" and t.device.index is not None
    }


def _listed(state: tuple[object, tuple[int, ...], object]) -> list[object]:
    version, internal, gauss = state
    return [version, list(internal), gauss]


def numpy_state() -> dict[str, object]:
    """Return the state of NumPy's global generator, which `numpy.random.rand` and its like draw from."""
    import numpy

    state = numpy.random.get_state(legacy=False)
    return {key: _plain(value) for key, value in state.items()}


def _plain(value: object) -> object:
    """Return arrays of a generator's state as lists, and numbers as Python's own."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def restore(state: Mapping[str, Any]) -> None:
    """Set this rank's generators. Raises LoadError CKM511 for a state that this torch cannot take."""
    import torch

    try:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
            for name in state:
                number = name.removeprefix("cuda")
                if name != number and number.isdecimal():
                    torch.cuda.set_rng_state(state[name], int(number))
        if "python" in state:
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise LoadError(
            "CKM511",
            f"the recorded random state is not one of this torch: {error}",
            "load with random='fresh'",
        ) from error


def recorded(
    tensors: Mapping[Path, LazyTensor],
    plain: Mapping[Path, object],
    rank: int,
) -> dict[str, object]:
    """Return the state of this rank's generators in a checkpoint; empty where it has none."""
    head = (KEY, f"rank{rank}")
    found: dict[str, object] = {
        str(path[2]): lazy.read()
        for path, lazy in tensors.items()
        if path[:2] == head and len(path) == 3
    }
    own = {path: value for path, value in plain.items() if path[:2] == head}
    nested: Any = nest(own).get(KEY, {})
    mine = nested.get(head[1]) if isinstance(nested, Mapping) else None
    found |= mine if isinstance(mine, Mapping) else {}
    return found if "cpu" in found else {}


def fresh(base: bytes, shard: Sequence[int]) -> int:
    """Seed every generator of this rank by the rule of the module's docstring, and return the seed."""
    import numpy
    import torch

    text = b"ckptmap stream|" + base + b"|" + ",".join(map(str, shard)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)  # it takes 32 bits
    return seed


def shard_of(targets: Sequence[LiveTensor]) -> tuple[int, ...]:
    """Return this rank's coordinate along the mesh dims that cut every trained tensor; () where some
    tensor is whole on every rank, whose replicas must be rounded alike."""
    trained = [target for target in targets if target.tensor.requires_grad] or targets
    places = [_place(target) for target in trained]
    first = places[0] if places else {}
    return tuple(at for dim, at in first.items() if all(dim in place for place in places))


def _place(target: LiveTensor) -> dict[str, int]:
    """Return mesh dim that cuts the tensor -> this rank's coordinate; the dims of several meshes are
    one where they have one name."""
    tensor = target.tensor
    if isinstance(target, FlatParamTensor):
        return {"flat": int(target.handle.rank)} if target.handle.uses_sharded_strategy else {}
    if not is_dtensor(tensor):
        return {}
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"{dim} of {mesh.ndim}" for dim in range(mesh.ndim)]
    found = zip(names, mesh.get_coordinate() or (), tensor.placements, strict=False)
    return {name: at for name, at, placement in found if not placement.is_replicate()}
