"""The checkpoint of --as: the output has its setup, names, encodings, dtypes and files.

    reference ──> Aim and options of the conversion      what `--to` and others would say
              ──> the encoding of each weight            `reference_encodings`
              ──> the stored bytes of unchanged weights   found by comparing values, when the plan is run

A plan is made from headers, and headers do not tell which weights are unchanged. So a plan first has
them all encoded; `convert` compares the values and plans once more, with `unchanged` known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open_another
from ckptmap.errors import ArgumentError, PlanError
from ckptmap.planning.options import Options
from ckptmap.protocols import Setup, part_key, through
from ckptmap.setups import Aim, parse
from ckptmap.storage.files import Files
from ckptmap.tensors import Cut, Opaque

DECIDED = (
    "wrap", "names_like", "names", "base", "encode", "no_encode", "exact_scales", "keep_layout", "root", "strict",
)  # fmt: skip
"""Options that say what the reference says."""


@dataclass(frozen=True)
class Reference:
    """A checkpoint that the output is like.

    unchanged  FQNs of the weights whose values are its own, bit for bit; None: not compared yet
    """

    ckpt: Checkpoint
    unchanged: frozenset[str] | None = None

    @property
    def shown(self) -> str:
        return self.ckpt.shown

    def keeps(self, fqn: str) -> bool:
        """Return whether the weight is written as the bytes of the reference."""
        return self.unchanged is not None and fqn in self.unchanged

    @property
    def needs_no_records(self) -> bool:
        """Whether the names of its tensors and its config.json tell how they are encoded. A pickled object of a
        library's class becomes tensors, of which only a record tells."""
        leaves = self.ckpt.index.leaves.values()
        return not self.ckpt.index.records and not any(
            isinstance(leaf, Opaque | Cut) for leaf in leaves
        )

    def aim(self) -> Aim:
        """Return its setup. Raises PlanError CKM201 where no writer writes it."""
        return Aim(self.setup.name, self.setup, None)

    @property
    def _setups(self) -> list[Setup]:
        """Return the setups whose writer makes such files; none where ckptmap only reads them."""
        container = self.ckpt.index.container
        return [setup for setup in registry.setups() if setup.writer == container]

    @property
    def setup(self) -> Setup:
        setups, wrappers = self._setups, self.ckpt.wrappers
        if not setups:
            raise PlanError(
                "CKM201",
                f"--as {self.shown}: is {self.ckpt.index.container}, which ckptmap reads and does not write",
                f"choose a setup with --to: {', '.join(setup.name for setup in registry.setups())}",
            )
        heads = {pattern.split(".")[0] for pattern in wrappers}
        wrapped = [setup for setup in setups if setup.wrap and setup.head in heads]
        return (wrapped or [setup for setup in setups if not setup.wrap] or setups)[-1]

    def options(self, given: Options) -> Options:
        """Return the options with what the reference decides and the user left open."""
        setup, ckpt = self.setup, self.ckpt
        changed = given
        if setup.carrier is not None and given.config_from is None:
            changed = replace(changed, config_from=ckpt.sidecar_dir)
        if setup.sharded and given.world_size is None and given.mesh is None:
            changed = replace(changed, world_size=ckpt.world_size)
        if not ckpt.optimizer_reader.present:
            changed = replace(changed, optimizer="drop")
        return changed

    def tied_heads(self) -> Mapping[str, str]:
        """Return head -> embedding, where its config.json ties the two and both are stored."""
        carrier = self.setup.carrier if self._setups else None
        if carrier is None:
            return {}
        path = Path(self.ckpt.sidecar_dir)
        directory = path if path.is_dir() else path.parent
        siblings = [str(file) for file in directory.iterdir()]
        return through(carrier, self.ckpt.files.mounts).ties(self.ckpt.infos(), siblings, None)

    def places(self) -> dict[str, tuple[str, int]]:
        """Return stored key -> (file, offset) of every weight that lies in one run of a file."""
        places: dict[str, tuple[str, int]] = {}
        for fqn in self.ckpt:
            group, name = self.ckpt.group(fqn), self.ckpt.names.get(fqn, fqn)
            for part, stored in group.parts.items():
                if stored.extent is not None:
                    key = part_key(group.encoding, name, part) if part else name
                    places[key] = (stored.extent.file, stored.extent.offset)
        return places


def aim_of(options: Options, reference: Reference | None) -> Aim:
    """Return what is written: as `--to` says, or as the checkpoint of `--as` is."""
    return parse(options.to) if reference is None else reference.aim()


def require_one(options: Options) -> None:
    """Raise ArgumentError CKM516 unless exactly one of `--to` and `--as` says what is written."""
    if options.as_ is None:
        return
    if options.to:
        raise ArgumentError(
            "CKM516",
            f"--as {options.as_!r}: found --to {options.to!r} beside it, expected one of them",
            "leave one out: the checkpoint of --as says into which setup",
        )
    for name in DECIDED:
        if getattr(options, name) not in (None, (), False):
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(
                "CKM516",
                f"{option}: the checkpoint of --as {options.as_!r} decides that",
                f"leave out {option}, or give --to in place of --as",
            )


def open_reference(options: Options, files: Files) -> Reference | None:
    """Return the checkpoint of --as, whose bytes the source's files read, too; None without one."""
    if options.as_ is None:
        return None
    with open_another(options.as_, files.mounts) as opened:
        named = files.mounts.with_origins(opened.path)  # of the Hub, `as_` is its mirror by now
        origin = opened.origin or (named if named != opened.path else "")
        return Reference(replace(opened, files=files, origin=origin))


def with_tied_heads(ckpt: Checkpoint, like: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the head that `like` stores, though its config.json ties it to the embedding.

    transformers saves such a model without the head, which is the embedding then.
    """
    heads = {
        head: ckpt.group(embedding)._replace(fqn=head)
        for head, embedding in Reference(like).tied_heads().items()
        if head not in ckpt and embedding in ckpt
    }
    if not heads:
        return ckpt
    names = {**ckpt.names, **{head: head for head in heads}}
    return replace(ckpt.with_groups(heads, ()), names=names)


def beside(ckpt: Checkpoint, reference: Reference) -> Checkpoint:
    """Return the source as one whose files are also those of the reference: a run watches them all."""
    ckpt = with_tied_heads(ckpt, reference.ckpt)
    seen = {**ckpt.fingerprints, **reference.ckpt.fingerprints}
    ckpt.files.seen = {**ckpt.files.seen, **reference.ckpt.fingerprints}
    more = [file for file in reference.ckpt.index.files if file not in ckpt.index.files]
    index = replace(ckpt.index, files=(*ckpt.index.files, *more))
    return replace(ckpt, index=index, fingerprints=seen)
