"""The state of a rank's random generators, saved under the rank's number and restored last.

    extra.rng.rank0.cpu  u8 [5056]      torch's CPU generator
    extra.rng.rank0.cuda u8 [16]        that of the rank's current CUDA device; of other accelerators likewise: xpu
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
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.core.state_paths import nest
from ckptmap.errors import LoadError
from ckptmap.live.model.flat_params import FlatParamTensor
from ckptmap.live.model.live_tensor import LiveTensor, is_dtensor
from ckptmap.tensors import Path

if TYPE_CHECKING:
    from ckptmap.storage.lazy_tensor import LazyTensor

KEY = "rng"
NO_DEVICES = frozenset({"cpu", "python", "numpy"})
"""Keys of a state that are of no accelerator."""
NO_STREAM = frozenset({"cpu", "meta"})
"""Kinds of devices whose generator is not saved beside torch's own."""


def captured(model: object = None) -> dict[str, object]:
    """Return a copy of the state of this rank's generators: torch tensors and plain values.

    Of the generators of devices, those of the current one and of those that the model is on.
    """
    import torch

    found: dict[str, object] = {
        "cpu": torch.get_rng_state(),
        "python": _listed(random.getstate()),
        "numpy": numpy_state(),
    }
    places = _devices(model)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        places.setdefault("cuda", set())
    for kind, numbers in places.items():
        if (module := _module(kind)) is not None:
            found[kind] = module.get_rng_state()
            others = numbers - {module.current_device()} if len(numbers) else ()
            found |= {f"{kind}{one}": module.get_rng_state(one) for one in sorted(others)}
    return found


def _devices(model: object) -> dict[str, set[int]]:
    """Return kind -> numbers of the devices that hold parameters or buffers. Those of a kind that has one device alone
    have no number."""
    import torch

    found: dict[str, set[int]] = {}
    if isinstance(model, torch.nn.Module):
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            device = tensor.device
            if device.type not in NO_STREAM:
                numbers = found.setdefault(device.type, set())
                if hasattr(_module(device.type), "current_device") and device.index is not None:
                    numbers.add(device.index)
    return found


def _module(kind: str) -> Any:
    """Return torch's module of a kind of device; None: it cannot be used here, or has no random state that torch gives
    out."""
    import torch

    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:
        return None
    gives = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
    return module if gives and module.is_available() else None


def not_recorded(state: Mapping[str, object], kinds: Iterable[str]) -> list[str]:
    """Return the kinds of devices of whose generators a recorded state has none."""
    return [kind for kind in kinds if kind not in NO_STREAM and kind not in state]


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
        for name in sorted(state.keys() - NO_DEVICES):
            kind = name.rstrip("0123456789")
            if (module := _module(kind)) is not None:
                number = name.removeprefix(kind)
                module.set_rng_state(state[name], *([int(number)] if number else []))
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
