"""Notes on small files beside the weights of a Hugging Face directory that nobody can read.

transformers goes on without a generation_config.json that it cannot parse, and generates by other settings
than the model's own; without a tokenizer_config.json it may choose another tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptmap.core.json_text import parse_object
from ckptmap.formats.safetensors.file import LFS_MAGIC
from ckptmap.storage.json_file import why_no_file
from ckptmap.storage.sidecar import Sidecar

PARSED = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Files that hold one object of settings, of some kilobytes."""


def unreadable_files(carried: Mapping[str, Sidecar]) -> list[str]:
    """Return a note on each file of settings that is copied although it holds no JSON object."""
    notes = []
    for name in PARSED:
        file = carried.get(name)
        if (
            file is None or file.file or file.content.startswith(LFS_MAGIC)
        ):  # a pointer has a note of its own
            continue
        problem = _problem(file.content)
        notes += [f"{name}: {problem}; it is copied unchanged"] if problem else []
    return notes


def missing_files(wanted: Iterable[str]) -> list[str]:
    """Return a note on each wanted path where a directory or a broken link stands in place of a file."""
    found = {path: why_no_file(path) for path in sorted(wanted)}
    return [f"{path}: {problem}, and is left out" for path, problem in found.items() if problem]


def _problem(content: bytes) -> str:
    try:
        parse_object(content, allow_nan=True)
    except ValueError as error:
        return f"cannot be read as JSON: {error}"
    return ""
