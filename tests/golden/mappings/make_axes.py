"""Fills the column `axes` of all tables with what the shipped mapping files say.

    python -m tests.golden.mappings.make_axes

Run it after a change of patterns that is meant; the difference shows in the tables.
"""

from __future__ import annotations

from dataclasses import replace

from tests.golden.mappings.tables import ROOT, read, write
from tests.mapping.test_goldens import TABLES, axes_in
from tests.support.mapping_state import entry_of


def main() -> None:
    for model, scheme in TABLES:
        path = ROOT / model / f"{scheme}.tsv"
        loaded = entry_of(model, scheme).load()
        table = {}
        for key, row in read(path).items():
            (axes,) = axes_in(loaded, key, model)
            table[key] = replace(row, axes=axes)
        lines = path.read_text().splitlines()
        write(path, table, [line[2:] for line in lines if line.startswith("# ")])


if __name__ == "__main__":
    main()
