"""Writes `hf-memory@ERA.tsv` of Gemma 3 with images, with an older transformers.

    PYTHONPATH=OLD python -m tests.golden.mappings.make_hf_older ERA

OLD is a folder with transformers 4.50.3 (for the era 4.50) or 4.57.3 (4.52) and what these need.
The numbers of `hf.tsv` are loaded by the names that these versions have on disk, those of the
published models, and what the loaded model saves is compared with them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.mapping_configs import iota

NAME = "gemma3"
TIED = "lm_head.weight"


def main() -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    era, folder = sys.argv[1], ROOT / NAME
    shapes = {key: row.shape for key, row in read(folder / "hf.tsv").items()}
    disk = {
        key.replace("vision_tower.", "vision_tower.vision_model."): value
        for key, value in iota(shapes)
    }
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, "config.json").write_text((folder / "config.json").read_text())
        save_file(disk, Path(temporary, "model.safetensors"), metadata={"format": "pt"})
        model = transformers.Gemma3ForConditionalGeneration.from_pretrained(temporary)
        model.save_pretrained(Path(temporary, "again"))
        again = load_file(Path(temporary, "again", "model.safetensors"))
    assert again.keys() == disk.keys()
    assert all(value.equal(disk[key]) for key, value in again.items())
    state = {key: value for key, value in model.state_dict().items() if not key.endswith(TIED)}
    made_by = [f"transformers {transformers.__version__}: from_pretrained, then state_dict()"]
    write(folder / f"hf-memory@{era}.tsv", rows(state), made_by)


if __name__ == "__main__":
    main()
