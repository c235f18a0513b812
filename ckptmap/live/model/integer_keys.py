"""Integer keys of dicts that hold tensors: DCP has only names, so that `state[0]` would come back as `state["0"]`.

{"state": {0: {"exp_avg": tensor}}}  ->  extra.NAME.state.0.exp_avg, extra.NAME.state.integer_keys = [0]

An optimizer's state dict has such keys, and takes state under others without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptmap.live.model import tuples

KEY = "ckptmap.integer_keys"
"""Name, beside the items of a dict, of the list of its integer keys."""


def of(value: Mapping[Any, object]) -> list[int]:
    """Return the keys of a dict that are integers."""
    return [key for key in value if isinstance(key, int)]


def restored(value: Mapping[Any, object]) -> dict[Any, object]:
    """Return a saved dict with its integer keys, in the order in which it had them, and its tuples."""
    listed = value.get(KEY)
    rest = {key: item for key, item in value.items() if key != KEY}
    if not isinstance(listed, list | tuple):
        return tuples.restored(rest)
    known = {str(key): key for key in listed if isinstance(key, int) and str(key) in rest}
    return tuples.restored({key: rest.pop(text) for text, key in known.items()} | rest)


def restored_below(value: Any) -> Any:
    """Return nested values with the integer keys of each dict."""
    if isinstance(value, Mapping):
        return restored({key: restored_below(item) for key, item in value.items()})
    return [*map(restored_below, value)] if isinstance(value, list) else value
