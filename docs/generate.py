"""Write the pages of the reference that come from the code: options of the commands, and error codes.

python docs/generate.py            writes docs/reference/options.md, errors.md and forms.md
python docs/generate.py --check    fails where they are not what the code says
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

REFERENCE = Path(__file__).parent / "reference"
WIDTH = 100


def options() -> str:
    """Return the page of all commands: the help of each, as the terminal shows it."""
    from ckptmap_cli.typer_app import COMMANDS, build
    from typer.testing import CliRunner

    parts = ["# Commands and their options\n"]
    for name in COMMANDS:
        result = CliRunner().invoke(
            build([name]), [name, "--help"], prog_name="ckptmap", terminal_width=WIDTH
        )
        parts.append(f"## {name}\n\n```text\n{result.stdout.strip()}\n```\n")
    return "\n".join(parts)


def errors() -> str:
    """Return the page of all error codes, each with its explanation."""
    from ckptmap.error_codes import CODES

    parts = ["# Error codes\n", "`ckptmap explain CODE` shows the same in a terminal.\n"]
    for name, code in CODES.items():
        parts.append(f"## {name}\n\n**{code.title}**\n\n{code.why}\n\nNext: {code.next_step}\n")
    return "\n".join(parts)


def forms() -> str:
    """Return the page of the forms of quantized weights, and of what can be done with each."""
    from ckptmap.planning.encoding_forms import encoding_forms
    from ckptmap.quantization.unsupported_schemes import SCHEMES

    parts = [
        "# Forms of quantized weights\n",
        "*Read* says whether the values are decoded; where no encoding is asked for, the bytes move as they are. *Written* says"
        " what follows the setup in `--to`, or that `--as` alone writes the form, into a release like the one that it names."
        " *Merged* says what `ckptmap merge` makes of a LoRA adapter over the form: values, in bfloat16 or any form that is"
        " written, and with `--force` the form itself. *Loaded* says what `ckptmap.load` puts into frozen layers of a live"
        " model: codes, or their values; other layers take values. *Codes kept* names the forms that take the codes unchanged"
        " where blocks are of equal size. The table is made from the registry, and a test tries each cell.\n",
        "| form | read | written | merged | loaded | codes kept |",
        "|---|---|---|---|---|---|",
    ]
    for form in encoding_forms():
        read = "values" if form.is_decoded else "bytes"
        written = f"`-{form.suffix}`" if form.suffix else "`--as`" if form.is_encoded else "no"
        merged = ("values, itself" if form.is_encoded else "values") if form.is_decoded else "no"
        loaded = "codes" if form.is_live else read
        kept = " ".join(f"`-{suffix}`" for suffix in form.kept_in) or "none"
        parts.append(f"| {form.name} | {read} | {written} | {merged} | {loaded} | {kept} |")
    parts.append(
        "\nGPTQ codes of 4 and 8 bits are kept where groups are of neighbouring columns. Those of 2 and 3 bits, and those in"
        " act-order (`g_idx`, `desc_act`), are kept in `--as` of their own release and where no form is named. Another form"
        " decodes them, bit-equal to the library, and quantizes anew: no form that is written has 2 or 3 bits, and"
        " compressed-tensors 0.20 refuses groups of columns in any order (`actorder: group`)."
    )
    names = sorted({scheme.name for scheme in SCHEMES}, key=str.lower)
    parts.append(
        f"\nRecognized where they are not of a form above, and moved as bytes: {', '.join(names)}.\n"
    )
    return "\n".join(parts)


def pages() -> Mapping[str, str]:
    """Return file name -> content of every generated page."""
    return {"options.md": options(), "errors.md": errors(), "forms.md": forms()}


def main() -> int:
    """Write the pages, or compare them; return the exit code."""
    stale = []
    for name, text in pages().items():
        file = REFERENCE / name
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"docs/reference: {', '.join(stale)} not as the code says: python docs/generate.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
