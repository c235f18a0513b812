"""Extra state of modules in state dicts: what `torch.nn.Module.get_extra_state()` returns.

    {"0.weight": ..., "0._extra_state": {"steps": 3, "seen": tensor}}    ("0._extra_state", "steps")

A single tensor under such a key is treated as a weight. Anything else is one plain value, which may
have tensors in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptmap.core.state_paths import ListIndex
from ckptmap.errors import CkptmapError
from ckptmap.formats.pickle.named_values import Global, Instance
from ckptmap.mapping.wrappers import strip_wrappers
from ckptmap.tensors import Leaf, Opaque, Path

SEGMENT = "_extra_state"
"""The last segment of its key in a state dict."""
OWN = "module_extra_state"
"""The dict in which `ckptmap.save` keeps it, by plain key."""


def is_extra_state(key: object) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2] == SEGMENT


def state_at(path: Path) -> int | None:
    """Return the index of the path's segment that is the key of a module's extra state; None: none is."""
    return next((at for at, segment in enumerate(path) if is_extra_state(segment)), None)


_BUFFER = Global("_io", "BytesIO")


def as_buffer(path: Path, leaf: Leaf) -> Instance | None:
    """Return an io.BytesIO, which Transformer Engine and others keep, as an inert value; None: it is none."""
    if not isinstance(leaf, Opaque) or leaf.class_name != "_io.BytesIO" or state_at(path) is None:
        return None
    state = leaf.state
    if leaf.args or not isinstance(state, tuple) or len(state) != 3:
        return None
    data, at, attributes = state
    if type(data) is not bytes or type(at) is not int or at < 0 or attributes:
        return None
    return Instance(_BUFFER, (data, at, None))


def as_live(value: object) -> object:
    """Return the io.BytesIO that an inert value of `as_buffer` stands for; any other value as it is."""
    if not isinstance(value, Instance) or value.cls != _BUFFER:
        return value
    from io import BytesIO

    assert isinstance(value.state, tuple), "`as_buffer` has made it"
    data, at, _ = value.state
    stream = BytesIO(data)
    stream.seek(at)
    return stream


def buffer_notes(values: Mapping[Path, object]) -> list[str]:
    """Return a note for the user if some values are io.BytesIO, which torch.load refuses by default."""
    buffers = [".".join(map(str, path)) for path, v in values.items() if isinstance(v, Instance)]
    if not buffers:
        return []
    more = f" and {len(buffers) - 1} more are" if len(buffers) > 1 else " is"
    return [f"{buffers[0]}{more} io.BytesIO: torch.load takes that with weights_only=False alone"]


@dataclass(frozen=True)
class States:
    """The extra values that are extra state of the converted model, and their keys in the output.

    at    path -> index of the segment that is the key
    keys  key -> key in the output
    """

    at: Mapping[Path, int]
    keys: Mapping[str, str]

    def __contains__(self, path: object) -> bool:
        return path in self.at

    def place(self, path: Path, root: Path) -> Path:
        """Return the path of an extra value in the output.

        Extra state goes to the model's dict at `root`; all else to `extra`, which is a dict also of
        what lay in a list beside the model.
        """
        at = self.at.get(path)
        if at is not None:
            return (*root, self.keys[str(path[at])], *path[at + 1 :])
        return ("extra", int(path[0]) if isinstance(path[0], ListIndex) else path[0], *path[1:])


NO_STATES = States({}, {})


def extra_state_keys(paths: Collection[Path], root: Path) -> tuple[dict[Path, int], dict[str, str]]:
    """Return the paths of extra state with the index of their key, and the plain name of each key.

    It lies in the dict of the model at `root`, or where `ckptmap.save` keeps it. What another
    model's dict holds does not count.
    """
    key_at: dict[Path, int] = {}
    root_of: dict[str, Path] = {}
    for dict_path in ((), root, (OWN,)):
        for path in paths:
            at = state_at(path)
            if at is None or path[:at] != dict_path:
                continue
            if root_of.setdefault(str(path[at]), dict_path) == dict_path:
                key_at[path] = at
    return key_at, strip_wrappers(root_of, "state dict") if root_of else {}


def plain_paths(paths: Collection[Path], root: Path) -> dict[Path, Path]:
    """Return the paths of extra state -> the paths by plain key, the same however the model was
    wrapped. Empty where two keys differ in wrappers only."""
    try:
        key_at, plain = extra_state_keys(paths, root)
    except CkptmapError:
        return {}
    return {path: (plain[str(path[at])], *path[at + 1 :]) for path, at in key_at.items()}


def states_of(paths: Collection[Path], root: Path, names: Mapping[str, str], prefix: str) -> States:
    """Return the extra state among these paths.

    `names` are those of the weights, plain -> in the output; `prefix` stands before the key of a
    module that has no weight.
    """
    key_at, plain = extra_state_keys(paths, root)
    return States(key_at, {key: _output_key(fqn, names, prefix) for key, fqn in plain.items()})


def _output_key(key: str, names: Mapping[str, str], prefix: str) -> str:
    module = key.removesuffix(SEGMENT)
    for fqn in names:
        tail = fqn.removeprefix(module)
        if fqn.startswith(module) and names[fqn].endswith(tail):
            return names[fqn].removesuffix(tail) + SEGMENT
    return prefix + key
