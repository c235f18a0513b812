"""The model card that a repository gets if it has none: what the model was made from, and how.

It states only what the manifest says. Fields are those of the Hub's model cards
(https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptmap.core.formatting import counted
from ckptmap.core.json_text import parse_object
from ckptmap.storage.hub.uri import is_hub, parse
from ckptmap.storage.manifest_schema import ManifestDocument
from ckptmap.version import __version__

NAME = "README.md"
LOSSY = ("quantize", "requantize")
MEANING: Mapping[str, str] = {
    "bytes": "the same bytes",
    "exact": "the same values, rearranged",
    "codes": "the same quantization codes, scales stored anew",
    "cast": "cast, bit-equal to torch.Tensor.to",
    "quantize": "quantized",
    "requantize": "quantized from another quantization",
}
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def base_of(origin: str, folder: Path) -> str | None:
    """Return the repository that a model was made from: its source, or the one its config names."""
    if is_hub(origin):
        return parse(origin).repo
    config = folder / "config.json"
    if not config.is_file():
        return None
    try:
        base = parse_object(config.read_bytes(), allow_nan=True).get("_name_or_path")
    except (OSError, ValueError):
        return None
    if not isinstance(base, str) or not _REPO.fullmatch(base) or os.path.exists(base):
        return None
    return base


def card(
    repo: str,
    base: str | None,
    setup: str,
    manifest: ManifestDocument | None,
    library: str | None = None,
) -> bytes:
    """Return the text of the card.

    manifest  of the published output; None where ckptmap did not write it
    library   the library whose `from_pretrained` loads the model
    """
    from huggingface_hub import ModelCard, ModelCardData

    steps = [] if manifest is None else list(manifest["logical"].values())
    kinds = Counter(str(step["fidelity"]) for step in steps)
    lossy = any(kinds[name] for name in LOSSY)
    about: dict[str, Any] = {"base_model_relation": "quantized"} if lossy and base else {}
    data = ModelCardData(
        base_model=base,
        library_name=library,
        tags=["ckptmap"],
        **about,
    )
    text = "\n".join(["---", data.to_yaml(), "---", *_body(repo, base, setup, manifest, kinds)])
    return str(ModelCard(text)).encode()


def _body(
    repo: str,
    base: str | None,
    setup: str,
    manifest: ManifestDocument | None,
    kinds: Mapping[str, int],
) -> list[str]:
    lines = [f"# {repo.split('/')[1]}", ""]
    lines += [f"Made from [{base}](https://huggingface.co/{base}).", ""] if base else []
    lines += [
        f"Published by ckptmap {__version__} as `{setup}`.",
        "This card is a stub: please replace it with one that describes the model.",
        "",
        "| | |", "|---|---|", f"| setup | `{setup}` |",
    ]  # fmt: skip
    if manifest is None:
        return [*lines, ""]
    origin = manifest["source"].get("origin")
    lines += [f"| made from | `{origin}`, a `{manifest['source']['setup']}` |"] if origin else []
    lines.append(f"| quantization | {_quantization(manifest)} |")
    lines += ["", "| tensors | fidelity |", "|---|---|"]
    lines += [f"| {count} | {name}: {MEANING.get(name, name)} |" for name, count in kinds.items()]
    return [*lines, ""]


def _quantization(manifest: ManifestDocument) -> str:
    """Return `14 tensors as nf4 (bfloat16)`, one such part for each target."""
    became = Counter(
        str(step["target"])
        for step in manifest["logical"].values()
        if step["fidelity"] in (*LOSSY, "codes")
    )
    return (
        ", ".join(f"{counted(count, 'tensor')} as {name}" for name, count in became.items())
        or "none"
    )
