"""Read and write the index of a Hugging Face directory (`model.safetensors.index.json`), and split
tensors into shards.

    {"metadata": {"total_size": bytes}, "weight_map": {tensor name: shard file name}}

Source: transformers `save_pretrained`, and the split of huggingface_hub
(`split_state_dict_into_shards_factory`).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

from ckptmap.core.json_text import JsonError, parse_json
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
INDEX_SUFFIX = ".safetensors.index.json"
SEPARATOR = ",\n    "
ENTRIES, MARK, NEXT, END = '"weight_map": {\n    "', '": "', f'"{SEPARATOR}"', '"\n  }'
"""What stands before the entries of an index, between a name and its file, between entries, and after them."""
MAX_INDEX_NBYTES = 100_000_000
HINT = "download the repository again, or save the model again"
OTHER_SAVE = "index and shards are of different saves; download both again"


@dataclass(frozen=True)
class ShardIndex:
    """The content of an index. The entries are a part of a text, which most readers need neither cut nor copy.

    text          holds `name": "file` of each tensor from `begin` to `end`, in the order of the index, with `between`
                  two of them and `mark` between name and file
    count         of tensors
    total_nbytes  bytes of all tensors, if given
    parse         returns tensor name -> shard file name. Raises as `parse_index`
    """

    text: str
    begin: int
    end: int
    mark: str
    between: str
    count: int
    total_nbytes: int | None
    parse: Callable[[], Mapping[str, str]]

    @property
    def entries(self) -> str:
        return self.text[self.begin : self.end]

    @cached_property
    def weight_map(self) -> Mapping[str, str]:
        """Tensor name -> shard file name. Raises as `parse_index`."""
        return self.parse()

    @cached_property
    def shards(self) -> Sequence[str]:
        """The files, each once, by their first entries. Raises as `parse_index`."""
        lines = self.entries.split(self.between)
        if self.text.count(self.mark, self.begin, self.end) != len(lines):
            return [*dict.fromkeys(self.weight_map.values())]
        # Names of shards are mostly of one length.
        width = len(lines[0]) - lines[0].rfind(self.mark)
        ends = dict.fromkeys(map(itemgetter(slice(-width, None)), lines))
        if not all(end.startswith(self.mark) for end in ends):
            ends = dict.fromkeys([line[line.rfind(self.mark) :] for line in lines])
        return [end[len(self.mark) :] for end in ends]

    def ordered(self, keys: Mapping[str, Sequence[str]]) -> Sequence[str] | None:
        """Return these shards by their first entries, where the index lists exactly these tensors; else None, and for
        a name that is in two files.

        keys  file -> the names of its tensors, which differ

        No entry is made where the index is sorted, as libraries write it.
        """
        if sum(map(len, keys.values())) != self.count:
            return None
        sorted_names = {shard: sorted(names) for shard, names in keys.items()}
        if all(sorted_names.values()) and self._lists(sorted_names):
            return sorted(sorted_names, key=lambda shard: sorted_names[shard][0])
        entries = [f"{name}{self.mark}{shard}" for shard, names in keys.items() for name in names]
        is_listed = sorted(self.entries.split(self.between)) == sorted(entries)
        return self.shards if is_listed and len(set().union(*keys.values())) == self.count else None

    def _lists(self, names: Mapping[str, Sequence[str]]) -> bool:
        """Return whether the entries are those of these sorted names of each shard, sorted by name.

        Names of one shard mostly follow each other: they are compared at once.
        """
        at, heads = self.begin, [(of_shard[0], shard, 0) for shard, of_shard in names.items()]
        heapify(heads)
        while heads:
            name, shard, first = heappop(heads)
            if heads and heads[0][0] == name:
                return False
            stop = bisect_left(names[shard], heads[0][0], first) if heads else None
            run = [*names[shard][first:stop], ""]
            text = f"{self.mark}{shard}{self.between}".join(run)
            if stop is None:
                text = text.removesuffix(self.between)
            elif stop < len(names[shard]):
                heappush(heads, (names[shard][stop], shard, stop))
            if not self.text.startswith(text, at):
                return False
            at += len(text)
        return at == self.end


def parse_index(file: str, mounts: Mounts) -> ShardIndex:
    """Return the content of an index file. Raise SourceError CKM108 if it cannot be read, or is not an
    index."""
    path = Path(file)
    try:
        if not path.stat().st_size:
            raise _bad(file, "is empty (0 bytes), expected an index")
        with mounts.local_copy(path).open("rb") as handle:
            data = handle.read(MAX_INDEX_NBYTES + 1)
    except OSError as error:
        raise _bad(file, f"cannot be read: {error.strerror}") from error
    return _as_written(data, file) or _general(data, file)


def _as_written(data: bytes, file: str) -> ShardIndex | None:
    """Return an index that transformers has written, indented, and with names that need no escapes, whose entries
    are not parsed; None for any other."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    begin, end = text.find(ENTRIES) + len(ENTRIES), text.rfind(END)
    if begin < len(ENTRIES) or end <= begin or len(data) > MAX_INDEX_NBYTES:
        return None
    around = text[: begin - len(ENTRIES)], text[end + len(END) :]
    count = text.count(NEXT, begin, end) + 1
    quotes = text.count('"', begin, end)
    escapes = text.find("\\", begin, end) >= 0
    if escapes or quotes != 4 * count - 2 or "weight_map" in "".join(around):
        return None
    try:
        tree = parse_json('"weight_map": {}'.join(around))
    except JsonError:
        return None
    if not isinstance(tree, dict) or tree.get("weight_map") != {}:
        return None
    return ShardIndex(
        text, begin, end, MARK, NEXT, count, total_size(tree),
        lambda: _general(Path(file).read_bytes(), file).weight_map,
    )  # fmt: skip


def _general(data: bytes, file: str) -> ShardIndex:
    """Return any index. Raise SourceError CKM108 for what is none."""
    try:
        tree = parse_json(data, max_nbytes=MAX_INDEX_NBYTES)
    except JsonError as error:
        raise _bad(file, f"is not an index: {error}") from error
    weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(file, f"weight_map, expected an object of names, found {_kind(weight_map)}")
    for key, shard in weight_map.items():
        if not isinstance(shard, str):
            raise _bad(file, f"weight_map[{key!r}], expected a file name, found {_kind(shard)}")
    # No name that a header may have holds a line feed or a NUL.
    entries = "\n".join(map("\0".join, weight_map.items()))
    count, total = len(weight_map), total_size(tree)
    return ShardIndex(entries, 0, len(entries), "\0", "\n", count, total, lambda: weight_map)


def total_size(tree: Mapping[str, object]) -> int | None:
    """Return the bytes of all tensors that an index states. Some writers (torch's consolidation) give a float."""
    metadata = tree.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(total) if isinstance(total, int | float) else None


def require_listed(home: Mapping[str, str], weight_map: Mapping[str, str], where: str) -> None:
    """Raise SourceError CKM108 for a tensor that another shard holds than the index lists, or none."""
    for key, shard in home.items():
        listed = weight_map.get(key, shard)
        if listed != shard:
            raise SourceError(
                "CKM108",
                f"{where}: tensor {key!r} is listed in {listed!r} but stored in {shard!r}",
                OTHER_SAVE,
            )
    absent = [key for key in weight_map if key not in home]
    if absent:
        raise SourceError(
            "CKM108",
            f"{where}: tensor {absent[0]!r} is listed in {weight_map[absent[0]]!r} but not "
            f"stored there ({len(absent)} such)",
            OTHER_SAVE,
        )


def emit_index(weight_map: Mapping[str, str], total_nbytes: int) -> bytes:
    """Return the bytes of an index, as transformers writes it, but without `total_parameters`: the parts
    of a quantized tensor are not parameters, so their number would be wrong."""
    tree = {"metadata": {"total_size": total_nbytes}, "weight_map": {"": ""}}
    head, tail = json.dumps(tree, indent=2).split('"": ""')
    # json takes ten times as long where it indents.
    quote = json.encoder.encode_basestring_ascii
    names = sorted(weight_map)
    files = {file: quote(file) for file in {*weight_map.values()}}
    quoted = map(files.__getitem__, map(weight_map.__getitem__, names))
    lines = map(": ".join, zip(map(quote, names), quoted, strict=True))
    return f"{head}{SEPARATOR.join(lines)}{tail}\n".encode()


def split_shards(nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Return for each shard the positions of its tensors; `nbytes` are their sizes, `limit` a shard's.

    As in huggingface_hub, a shard is filled in the given order until the next tensor does not fit. A
    tensor larger than the limit becomes a shard of its own and does not end the current one.
    """
    large = [at for at, size in enumerate(nbytes) if size > limit]
    alone = {*large}
    others = [at for at in range(len(nbytes)) if at not in alone]
    filled = [0, *accumulate(map(nbytes.__getitem__, others))]
    shards = [(at, [at]) for at in large]
    begin = 0
    while begin < len(others):
        end = bisect_right(filled, filled[begin] + limit, begin) - 1
        ended_by = others[end] if end < len(others) else len(nbytes)
        shards.append((ended_by, others[begin:end]))
        begin = end
    return [shard for _, shard in sorted(shards)]


def shard_name(stem: str, number: int, count: int) -> str:
    """Return a file name like `model-00001-of-00002.safetensors`, or `model.safetensors` for the only
    shard."""
    return f"{stem}{'' if count == 1 else f'-{number:05d}-of-{count:05d}'}.safetensors"


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _bad(file: str, what: str) -> SourceError:
    return SourceError("CKM108", f"{file}: {what}", HINT)
