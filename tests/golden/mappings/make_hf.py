"""Writes `config.json`, `hf.tsv` and `hf-memory.tsv` of every tiny model, with transformers' code.

    python -m tests.golden.mappings.make_hf [model …]

`hf` is what `save_pretrained` writes and `hf-memory` the state dict of the model that
`from_pretrained` then makes of it, tied tensors once. A model whose two tables are equal gets no
second one. Written with transformers 5.23.0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.golden.mappings.tables import ROOT, rows, write
from tests.support.mapping_configs import TINY, Tiny, iota

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]

ERAS = {"gemma3": "@5.0"}
"""Models whose names in memory have changed; the older ones are made by `make_hf_older`."""


def disk_state(tiny: Tiny) -> tuple[State, str]:
    """(the iota state dict under the names that transformers writes, text of its config.json)."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        tiny.build().save_pretrained(folder)
        config = Path(folder, "config.json").read_text()
        written = load_file(Path(folder, "model.safetensors"))
    shapes = {key: tuple(tensor.shape) for key, tensor in written.items()}
    return dict(iota({**shapes, **tiny.disk_extra})), config


def memory_state(disk: State, config: str, auto: str) -> State:
    """The state dict of the model that `from_pretrained` makes of `disk`, each storage once."""
    import transformers
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        save_file(disk, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model = getattr(transformers, auto).from_pretrained(folder)
        tied = set(model.all_tied_weights_keys)
        state = {key: value for key, value in model.state_dict().items() if key not in tied}
        assert_same(written_again(model, folder), disk)
    return state


def written_again(model: object, folder: str) -> State:
    """What the loaded model saves: the way back, by transformers too."""
    from safetensors.torch import load_file

    again = Path(folder, "again")
    model.save_pretrained(again)  # type: ignore[attr-defined]
    state: State = load_file(again / "model.safetensors")
    return state


def assert_same(again: State, disk: State) -> None:
    """Every tensor that transformers knows comes back equal to the bit."""
    for key, tensor in again.items():
        assert tensor.equal(disk[key]), key


def main() -> None:
    import transformers

    version = f"transformers {transformers.__version__}"
    for name in sys.argv[1:] or TINY:
        tiny, folder = TINY[name], ROOT / name
        disk, config = disk_state(tiny)
        memory = memory_state(disk, config, tiny.auto)
        made_by = [f"{version}: save_pretrained; iota over the sorted keys"]
        write(folder / "hf.tsv", rows(disk), made_by)
        (folder / "config.json").write_text(json.dumps(json.loads(config), indent=1) + "\n")
        loadable = {key: value for key, value in disk.items() if key not in tiny.disk_extra}
        if rows(memory) != rows(loadable) and not tiny.disk_extra:
            made_by = [f"{version}: from_pretrained, then state_dict()"]
            write(folder / f"hf-memory{ERAS.get(name, '')}.tsv", rows(memory), made_by)


if __name__ == "__main__":
    main()
