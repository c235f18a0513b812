"""Work once for all quantized weights of one form: the first is checked, the others take what was found.

    layers.0.fc.weight_packed i32 [64, 8], layers.0.fc.weight_scale bf16 [64, 2]     made and checked
    layers.1.fc.weight_packed i32 [64, 8], layers.1.fc.weight_scale bf16 [64, 2]     the same encoding

A checkpoint has 100,000 quantized weights, of three or four forms. A reader makes the group of a weight from
tensors that it looks up by name. What it looks up, found or not, is noted; another weight that shows the
same under the same names has the same form. So no reader tells what its checks depend on, save the values
that it read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from ckptmap.protocols import Encoding, Group
from ckptmap.tensors import StoredTensor, TensorInfo

Found: TypeAlias = tuple[Group, Sequence[str]]
"""The group of a weight, and the stored keys of its parts."""
Make: TypeAlias = Callable[[Mapping[str, StoredTensor]], Found]
"""Makes a group from the tensors that it looks up: from their names, shapes and dtypes alone."""


class WeightForms:
    """Makes groups of the tensors `stored`, one call of `make` for each form."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._forms: dict[tuple[Hashable, ...], list[_Form]] = {}
        self._lasts: Set[str] = frozenset()

    def group(self, fqn: str, make: Make, *facts: Hashable) -> Found:
        """Return the group of the weight `fqn`, as `make` would.

        facts  what else `make` depends on: values that were read, its record, its part of a config

        Raise what `make` raises.
        """
        stem, dot, last = fqn.rpartition(".")
        stem += dot
        forms = self._forms.setdefault((last, *facts), [])
        for form in forms:
            found = form.of(fqn, stem, self._stored)
            if found is not None:
                return found
        looked = _Looked(self._stored)
        group, keys = make(looked)
        if not self._lasts:
            self._lasts = {key.rpartition(".")[2] for key in self._stored}
        made = _form(stem, group, keys, looked, self._lasts)
        if made is not None:
            forms.insert(0, made)
        return group, keys


def one_of_each_form(
    groups: Sequence[Group], said: Callable[[str], Sequence[object]] = lambda fqn: ()
) -> Iterator[Group]:
    """Yield one of the groups that `WeightForms` made of each form, of which all others have the same parts.

    said  returns the objects that describe a weight besides: only weights of the same objects are alike
    """
    seen = set()
    for group in groups:
        shown = [id(part.info) for part in group.parts.values()]
        form = id(group.encoding), id(group.info), *shown, *map(id, said(group.fqn))
        if form not in seen:
            seen.add(form)
            yield group


@dataclass(frozen=True, slots=True)
class _Form:
    """What the weights of a form have in common.

    shown     (what follows the module in a key, the tensor's shape and dtype; None: there is none)
    parts     (name of a part, its number in `shown`)
    consumed  the numbers of the parts' keys in `shown`
    """

    shown: Sequence[tuple[str, TensorInfo | None]]
    info: TensorInfo
    encoding: Encoding
    parts: Sequence[tuple[str, int]]
    consumed: Sequence[int]

    def of(self, fqn: str, stem: str, stored: Mapping[str, StoredTensor]) -> Found | None:
        """Return the group of a weight in the module `stem`; None: it has another form."""
        tensors = []
        for tail, want in self.shown:
            tensor = stored.get(stem + tail)
            have = None if tensor is None else tensor.info
            if have is not want and have != want:
                return None
            tensors.append(tensor)
        parts = {name: tensors[number] for name, number in self.parts}
        keys = [stem + self.shown[number][0] for number in self.consumed]
        return Group(fqn, self.info, self.encoding, parts), keys  # type: ignore[arg-type]


class _Looked(Mapping[str, StoredTensor]):
    """Stored tensors that note which keys are looked up, and what is found there."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self.found: dict[str, StoredTensor | None] = {}
        self.listed = False
        """Whether the keys were listed: then the group may depend on any tensor."""

    def __getitem__(self, key: str) -> StoredTensor:
        tensor = self.found[key] = self._stored.get(key)
        if tensor is None:
            raise KeyError(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        self.listed = True
        return iter(self._stored)

    def __len__(self) -> int:
        self.listed = True
        return len(self._stored)


def _form(
    stem: str, group: Group, keys: Sequence[str], looked: _Looked, lasts: Set[str]
) -> _Form | None:
    """Return the form of a group that was made; None: it depends on more than tensors of its module.

    lasts  the last segments of all stored keys: what ends in none of them is absent everywhere
    """
    found = {
        key: tensor
        for key, tensor in looked.found.items()
        if tensor is not None or key.rpartition(".")[2] in lasts
    }
    numbers = {id(tensor): at for at, tensor in enumerate(found.values())}
    names = {key: at for at, key in enumerate(found)}
    inside = all(key.startswith(stem) for key in found)
    taken = all(id(part) in numbers for part in group.parts.values())
    if looked.listed or not inside or not taken or not all(key in names for key in keys):
        return None
    return _Form(
        [
            (key[len(stem) :], None if tensor is None else tensor.info)
            for key, tensor in found.items()
        ],
        group.info,
        group.encoding,
        [(name, numbers[id(part)]) for name, part in group.parts.items()],
        [names[key] for key in keys],
    )
