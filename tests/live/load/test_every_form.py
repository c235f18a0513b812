"""Every encoding that is written and decoded goes into a live FSDP2 model, decoded shard by shard."""

from __future__ import annotations

from pathlib import Path

import ckptmap
from ckptmap.planning.encoding_forms import encoding_forms
from tests.corpus.ranks import run_ranks
from tests.support import gpt_oss
from tests.support.int8_models import dense

FORMS = sorted({form.suffix for form in encoding_forms() if form.suffix and not form.is_live})
"""Those that are decoded; `tests.live.quantized` has those whose codes a model keeps."""


def test_every_form_into_shards_of_two_ranks(tmp_path: Path) -> None:
    """The values are those of the conversion to bfloat16, which tests of each form compare with its library."""
    base, forms = dense(tmp_path / "dense", hidden=128), tmp_path / "forms"
    for form in FORMS:
        folder = forms / form
        folder.mkdir(parents=True)
        if form == "mxfp4":
            gpt_oss.write(folder / "in")
        else:
            report = ckptmap.convert(base, folder / "in", to=f"full-{form}")
            assert report.fidelity["quantize"] > 0, form
        ckptmap.convert(folder / "in", folder / "values.pt", to="full-bf16")
    run_ranks("tests.ranks.load_every_form", 2, [str(forms)], timeout=300)
