"""The encoding records of a checkpoint, by FQN, of which each scheme takes its own.

Some twenty schemes ask, and there may be 70,000 records of one scheme: they are told apart once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from ckptmap.core.columns import firsts
from ckptmap.protocols.encodings import Record, Records


class EncodingRecords(dict[str, Record]):
    """Records by FQN; not changed once a scheme was asked."""

    @cached_property
    def firsts(self) -> Sequence[tuple[str, Record]]:
        """The different objects among the records, each with the first FQN that has it."""
        return firsts(self)

    @cached_property
    def by_scheme(self) -> Mapping[object, Mapping[str, Record]]:
        """The records of each scheme that is a text."""
        found: dict[object, dict[str, Record]] = defaultdict(dict)
        for fqn, record in self.items():
            scheme = record.get("scheme")
            if isinstance(scheme, str):
                found[scheme][fqn] = record
        return dict(found)


def different(records: Records) -> Sequence[tuple[str, Record]]:
    """Return the different objects among records, each with the first FQN that has it."""
    return records.firsts if isinstance(records, EncodingRecords) else firsts(records)


def records_of(records: Records, schemes: Collection[str]) -> dict[str, Record]:
    """Return the records of these schemes, in their order."""
    by_scheme = records.by_scheme if isinstance(records, EncodingRecords) else None
    if by_scheme is not None:
        there = [scheme for scheme in schemes if scheme in by_scheme]
        if len(there) < 2:
            return dict(by_scheme[there[0]]) if there else {}
    return {
        fqn: record
        for fqn, record in records.items()
        if isinstance(scheme := record.get("scheme"), str) and scheme in schemes
    }
