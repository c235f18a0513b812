"""What the metadata of a GGUF file says of the model, in lines for a reader."""

from __future__ import annotations

from ckptmap.core.formatting import counted
from ckptmap.formats.gguf.cursor import Texts
from ckptmap.formats.gguf.header import GgufHeader, Numbers, Value

SHOWN_CHARS = 60
SIZES = (
    ("block_count", "layers"),
    ("embedding_length", "wide"),
    ("attention.head_count", "heads"),
    ("context_length", "tokens of context"),
    ("expert_count", "experts"),
)


def about(header: GgufHeader) -> str:
    """Return version, architecture, name and sizes of the model in one line."""
    arch, name = header.text("general.architecture"), header.text("general.name")
    sizes = [
        f"{value} {word}"
        for key, word in SIZES
        if (value := header.count(f"{arch}.{key}")) is not None
    ]
    model = [repr(name[:SHOWN_CHARS])] if name else []
    called = f"architecture {arch[:SHOWN_CHARS]}" if arch else "no architecture stated"
    return ", ".join([f"GGUF version {header.version}", called, *model, *sizes])


def listed(header: GgufHeader) -> dict[str, str]:
    """Return each key of the metadata with its value as text, cut short."""
    return {key[: 2 * SHOWN_CHARS]: shown(value) for key, value in header.metadata.items()}


def shown(value: Value) -> str:
    """Return a value as text, at most about SHOWN_CHARS characters of it."""
    if isinstance(value, Texts):
        return f"<{counted(value.count, 'text')}>"
    if isinstance(value, Numbers):
        return f"<{counted(value.count, 'number')}>"
    if isinstance(value, tuple) and len(value) > 8:
        return f"<{counted(len(value), 'number')}>"
    text = repr(value if not isinstance(value, str) else value[: 2 * SHOWN_CHARS])
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
