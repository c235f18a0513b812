"""The benchmark cases: what is converted, by which programs (contestants), and the targets.

Times are ratios to `cp -r` of the same source, so that a slow disk or a busy machine cancels out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from rank_sources import SETS
from sparse_sources import EXPERTS, FORMS

PEERS = Path(__file__).with_name("peers.py")
MIB = 1 << 20
OURS, COPY = "ckptmap", "cp -r"
QUICK, SYNCED_COPY = "ckptmap --no-sync", "cp -r, synced"
SYNCED = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
"""A shell command with the arguments SRC and DST, which returns when every file is on disk."""


@dataclass(frozen=True)
class Target:
    """The targets of a case for the median of its runs; None: the value is only shown.

    CPU time is measured on a default run, because waiting for the disk costs none. Wall time is
    compared with that of a run with --no-sync, because neither `cp` nor a peer waits for the disk.

    cpu, wall        the most CPU and wall time, as a multiple of that of `cp`
    synced_wall      the most wall time of a default run, as a multiple of `cp` and a sync
    anon_nbytes      the most anonymous memory at the peak
    peer_cpu         the least CPU time of a peer, as a multiple of ckptmap's
    peer_wall        the least wall time of a peer, as a multiple of ckptmap's
    item_s           the most CPU seconds for an item (tensor or chunk) beyond those of `cp`
    own_wall_s       the most wall seconds
    """

    cpu: float | None = None
    wall: float | None = None
    synced_wall: float | None = None
    anon_nbytes: int | None = None
    peer_cpu: float | None = None
    peer_wall: float | None = None
    item_s: float | None = None
    own_wall_s: float | None = None


@dataclass(frozen=True)
class Case:
    """One job, done by ckptmap, by `cp -r` and by the libraries that people use today (peers).

    args         the arguments of `ckptmap`, with SRC and DST for the paths
    peers        functions of `peers.py` that do the same job
    peer_source  the source for the peers, if their tool reads another format
    items        the number of tensors or chunks, if the cost of each is measured
    copies       whether to compare with `cp -r`; False for cases that read only headers
    """

    name: str
    title: str
    source: str
    args: tuple[str, ...]
    peers: tuple[str, ...]
    target: Target
    peer_source: str = ""
    items: int = 0
    copies: bool = True
    slow: bool = False
    """Whether the peers take so long that they run only once, without a warm-up."""

    @property
    def ours(self) -> str:
        """The ckptmap contestant that, like `cp` and the peers, does not wait for the disk."""
        return QUICK if self.copies else OURS

    def commands(self, source: Path, peer_source: Path, destination: Path) -> dict[str, list[str]]:
        """Return the command line of each contestant."""
        names = {"SRC": str(source), "DST": str(destination)}
        python = [sys.executable, "-m", "ckptmap"]
        ours = [*python, *(names.get(word, word) for word in self.args)]
        found = {OURS: ours}
        if self.copies:
            found = {
                COPY: ["cp", "-r", str(source), str(destination)],
                SYNCED_COPY: ["sh", "-c", SYNCED, str(source), str(destination)],
                OURS: ours,
                QUICK: [*ours, "--no-sync"],
            }
        places = [str(peer_source), *([str(destination)] if self.copies else [])]
        for peer in self.peers:
            found[peer] = [sys.executable, str(PEERS), peer, *places]
        return found


def _convert(to: str, *more: str) -> tuple[str, ...]:
    return ("convert", "SRC", "DST", "--to", to, "--quiet", *more)


MOVES = Target(cpu=1.5, wall=1.3, synced_wall=0.8, anon_nbytes=96 * MIB, peer_cpu=4, peer_wall=4)
MANY_RANKS = Target(cpu=2.5, wall=2.5, anon_nbytes=96 * MIB, peer_cpu=4, peer_wall=4)
NF4 = Target(cpu=5, anon_nbytes=300 * MIB, peer_cpu=20, peer_wall=20)
MANY_NBYTES = 96 * MIB + 100_000 * 2048

MODEL: Sequence[Case] = (
    Case(
        "dcp-hf", "DCP of 4 ranks -> HF safetensors", "dcp", _convert("hf"),
        ("accelerate_merge",), MOVES,
    ),
    Case(
        "dcp-full", "DCP of 4 ranks -> one torch.save file", "dcp", _convert("full"),
        ("dcp_to_torch_save",), MOVES,
    ),
    Case(
        "dcp-columns-hf", "DCP of 4 ranks, cut by columns -> HF safetensors", "dcp_columns",
        _convert("hf"), ("accelerate_merge",), MOVES,
    ),
    Case(
        "ranks-hf", "4 rank files of DTensors -> HF safetensors", "ranks", _convert("hf"),
        ("rank_files",), MOVES,
    ),
    Case(
        "pt-hf", "`module._orig_mod.` torch.save file -> HF safetensors", "pt", _convert("hf"),
        ("load_and_save_file",), MOVES,
    ),
    Case(
        "shards-hf", "HF shards -> one safetensors file", "hf_shards",
        _convert("hf", "--max-shard-size", "5GB"), ("load_file_and_save_file",), MOVES,
    ),
    Case(
        "hf-dcp8", "HF safetensors -> DCP of 8 ranks", "hf", _convert("fsdp2", "--world-size", "8"),
        ("torch_save_to_dcp",), MANY_RANKS, peer_source="pt",
    ),
    Case(
        "fp32-bf16", "HF safetensors fp32 -> bf16", "hf_fp32", _convert("hf-bf16"), ("cast_bf16",),
        Target(anon_nbytes=300 * MIB),
    ),
    Case(
        "nf4", "HF safetensors bf16 -> NF4, DCP of 8 ranks", "hf",
        _convert("fsdp2-nf4", "--world-size", "8"), ("torchao_nf4",), NF4, slow=True,
    ),
)  # fmt: skip

GROWTH: Sequence[Case] = (
    Case(
        "many-safetensors", "100,000 x 4 KB: safetensors -> torch.save", "many_safetensors",
        _convert("full"), (), Target(item_s=15e-6, anon_nbytes=MANY_NBYTES), items=100_000,
    ),
    Case(
        "many-pt", "100,000 x 4 KB: torch.save -> safetensors", "many_pt", _convert("hf"),
        ("load_and_save_file",), Target(item_s=15e-6, anon_nbytes=MANY_NBYTES, peer_cpu=4),
        items=100_000,
    ),
    Case(
        "many-dcp", "100,000 x 4 KB: DCP -> torch.save", "many_dcp", _convert("full"),
        ("dcp_to_torch_save",), Target(item_s=40e-6, anon_nbytes=MANY_NBYTES, peer_cpu=4),
        items=100_000,
    ),
    Case(
        "files-dcp", "DCP of 1,024 files -> HF safetensors", "dcp_files", _convert("hf"),
        ("accelerate_merge",), MOVES,
    ),
)  # fmt: skip

RANKS = Target(cpu=2, wall=2, anon_nbytes=96 * MIB + 74_496 * 2048, peer_cpu=8)
MERGERS = ("verl_merger",) if find_spec("verl") else ("load_all_and_cat",)
"""verl's own merger if it is installed, else the same steps with torch alone: load all ranks, then
concatenate."""


def _ranks(source: str) -> Case:
    world, width = SETS[source]
    title = f"{world} rank files, {world * 291:,} shards, width {width:,} -> HF safetensors"
    name, slow = source.replace("_", "-"), width > 1024
    return Case(name, title, source, _convert("hf"), MERGERS, RANKS, slow=slow)


RANK_FILES: Sequence[Case] = (
    *map(_ranks, SETS),
    Case(
        "files-dcp-full", "DCP of 1,024 files -> one torch.save file", "dcp_files",
        _convert("full"), ("dcp_to_torch_save",), replace(MOVES, peer_cpu=8, peer_wall=None),
    ),
)  # fmt: skip

SMALL = Target(own_wall_s=0.15)
LARGE = Target(own_wall_s=0.65, anon_nbytes=MANY_NBYTES)


def _inspect(source: str, title: str, peer: str, target: Target) -> Case:
    args = ("inspect", "SRC")
    return Case(f"inspect-{source}", title, source, args, (peer,), target, copies=False)


INSPECT: Sequence[Case] = (
    _inspect("hf", "inspect: safetensors", "list_safetensors", SMALL),
    _inspect("pt", "inspect: torch.save", "list_pt", SMALL),
    _inspect("dcp", "inspect: DCP", "list_dcp", SMALL),
    _inspect("many_safetensors", "inspect: 100,000 in safetensors", "list_safetensors", LARGE),
    _inspect("many_pt", "inspect: 100,000 in torch.save", "list_pt", LARGE),
    _inspect("many_dcp", "inspect: 100,000 in DCP", "list_dcp", LARGE),
    Case(
        "report-many_safetensors", "report: 100,000 in safetensors", "many_safetensors",
        ("report", "SRC", "-o", "DST"), ("list_safetensors",), Target(own_wall_s=5), copies=False,
    ),
)  # fmt: skip


def _headers(form: str) -> Sequence[Case]:
    """Return `inspect` and `plan` of a model of 200,000 stored tensors or more, beside its headers alone."""
    weights = f"{(FORMS[form].layers - 1) * EXPERTS * 3:,}"
    shown = Target(peer_cpu=1 / 4, anon_nbytes=96 * MIB + 200_000 * 2048)
    planned = Target(peer_cpu=1 / 8, anon_nbytes=96 * MIB + 200_000 * 2048)
    return (
        Case(
            f"headers-inspect-{form}", f"inspect: {weights} weights of {form}", form,
            ("inspect", "SRC"), ("parse_headers",), shown, copies=False,
        ),
        Case(
            f"headers-plan-{form}", f"plan --to hf-bf16: {weights} weights of {form}", form,
            ("plan", "SRC", "--to", "hf-bf16"), ("parse_headers",), planned, copies=False,
        ),
    )  # fmt: skip


def _dense_headers(source: str, to: str, peer: str) -> Sequence[Case]:
    """Return `inspect` and `plan` of 100,000 dense tensors, beside the parser of their headers alone."""
    name, title = source.replace("many_", "dense-"), source.replace("many_", "100,000 in ")
    return (
        Case(
            f"headers-inspect-{name}", f"inspect: {title}", source, ("inspect", "SRC"), (peer,),
            Target(peer_cpu=1 / 4, anon_nbytes=MANY_NBYTES), copies=False,
        ),
        Case(
            f"headers-plan-{name}", f"plan --to {to}: {title}", source,
            ("plan", "SRC", "--to", to), (peer,),
            Target(peer_cpu=1 / 8, anon_nbytes=MANY_NBYTES), copies=False,
        ),
    )  # fmt: skip


HEADERS: Sequence[Case] = [
    *(case for form in FORMS for case in _headers(form)),
    *_dense_headers("many_safetensors", "full", "parse_headers"),
    *_dense_headers("many_pt", "hf", "unpickle_inert"),
    *_dense_headers("many_dcp", "hf", "unpickle_inert"),
]

GROUPS = {
    "model": MODEL, "growth": GROWTH, "ranks": RANK_FILES, "inspect": INSPECT, "headers": HEADERS,
}  # fmt: skip
