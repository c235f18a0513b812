"""The registry of formats, layouts, encodings and setups: one line each, imported when first
needed.

Other packages add to it by entry points. An entry point of the group `ckptmap.containers`,
`ckptmap.directories`, `ckptmap.writers`, `ckptmap.layouts`, `ckptmap.schemes`, `ckptmap.key_forms`,
`ckptmap.unflatteners`, `ckptmap.live_forms`, `ckptmap.optimizer_families` or `ckptmap.setups` names
a class or an object of the protocol of that name. Objects of entry points are asked before those of
this package: only the code of a format based on torch's zip can tell that format from torch's own.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckptmap.known_schemes import SCHEMES
from ckptmap.protocols import Container, Directory, Layout, Place, Scheme, Setup, Writer

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BrokenEntryPoint", "broken_entry_points", "card", "container_for", "directory_for", "key_forms", "knows",
    "layout", "layouts", "live_forms", "loaded", "optimizer_families", "runner", "schemes", "schemes_in",
    "schemes_named", "schemes_of_method", "setups", "setups_named", "setups_of", "unflatteners", "writer",
]  # fmt: skip


class Known(NamedTuple):
    """A format of this package: where its class is, and what every place that it claims has.

    directory  a text in the name of an entry; None: it claims no directory
    file       a text in the absolute path, or the first bytes; None: it claims no file
    """

    spec: str
    directory: str | None = None
    file: str | bytes | None = None

    def may_claim(self, place: Place) -> bool:
        """Return whether the format must be asked; its module is not imported for that."""
        if place.is_dir:
            text = self.directory
            return text is not None and any(text in name for name in place.names)
        if isinstance(self.file, bytes):
            return place.head.startswith(self.file)
        return self.file is not None and self.file in str(Path(place.path).absolute())


CONTAINERS = (  # asked in this order: formats with marks of their own before more general ones
    Known("ckptmap.formats.megatron.dcp_reader:DcpMegatron", ".metadata"),
    Known("ckptmap.formats.dcp.reader:Dcp", ".metadata"),
    Known("ckptmap.formats.torch_checkpointing.reader:TorchCheckpointing", "metadata.pkl"),
    Known("ckptmap.formats.torch_checkpointing.reader:TorchCheckpointing", "_0."),
    Known("ckptmap.formats.huggingface.format:HfDirectory", ".safetensors"),
    Known("ckptmap.formats.huggingface.bin_format:HfBin", ".bin"),
    Known("ckptmap.formats.dcp.safetensors_reader:DcpHf", ".safetensors"),
    Known("ckptmap.formats.meta.reader:Consolidated", "consolidated", "consolidated"),
    Known("ckptmap.formats.deepspeed.reader:ZeroStep", "mp_rank_"),
    Known("ckptmap.formats.megatron.reader:Megatron", "mp_rank_", "mp_rank_"),
    Known("ckptmap.formats.rank_files.reader:RankFiles", ""),
    Known("ckptmap.formats.gguf.reader:GgufFile", ".gguf", b"GGUF"),
    Known("ckptmap.formats.safetensors.format:SafetensorsFile", None, ""),
    Known("ckptmap.formats.torch_save.format:TorchZip", None, b"PK\3\4"),
)
DIRECTORIES = (
    Known("ckptmap.formats.deepspeed.directory:DeepSpeed", "latest"),
    Known("ckptmap.formats.frameworks.trainer:Trainer", "trainer_state.json"),
    Known("ckptmap.formats.frameworks.verl:Verl", "model_world_size_"),
    Known("ckptmap.formats.frameworks.accelerate:Accelerate", ""),
    Known("ckptmap.formats.frameworks.lightning:Lightning", "meta.pt"),
)
WRITERS = (
    "ckptmap.formats.huggingface.format:HfWriter",
    "ckptmap.formats.torch_save.format:TorchZipWriter",
    "ckptmap.formats.dcp.writer:DcpWriter",
    "ckptmap.formats.rank_files.writer:RankFilesWriter",
    "ckptmap.formats.rank_files.fsdp1_local_writer:Fsdp1LocalWriter",
    "ckptmap.formats.dcp.safetensors_writer:DcpHfWriter",
    "ckptmap.formats.frameworks.directory_writers:AccelerateWriter",
    "ckptmap.formats.frameworks.directory_writers:AccelerateFullWriter",
    "ckptmap.formats.frameworks.directory_writers:TrainerWriter",
    "ckptmap.formats.gguf.writer:GgufWriter",
)
LAYOUTS = (
    "ckptmap.sharding.full:Full",
    "ckptmap.sharding.shard0:Shard0",
    "ckptmap.formats.rank_files.sharded_tensor_layout:ShardedTensorLayout",
    "ckptmap.formats.rank_files.dtensor_layout:DTensorLayout",
    "ckptmap.sharding.device_mesh:Mesh",
    "ckptmap.sharding.fsdp1_layout:FlatCut",
)
KEY_FORMS = (  # of optimizer state, asked in this order
    "ckptmap.optim.keys_flattened:Flattened",
    "ckptmap.optim.keys_by_index:ByIndex",
    "ckptmap.optim.keys_by_fqn:ByFqn",
)
UNFLATTENERS = (  # applied in this order: the optimizer's needs the unflattened weights
    "ckptmap.sharding.flat_param:FlatParams",
    "ckptmap.optim.fsdp1_raw_state:FlatOptimizer",
)


class KnownSetup(NamedTuple):
    """A setup of this package: its name, that of its writer, and where it is."""

    name: str
    writer: str
    spec: str


SETUPS = (
    KnownSetup("hf", "hf", "ckptmap.formats.huggingface.format:HF"),
    KnownSetup("full", "torch-zip", "ckptmap.formats.torch_save.format:FULL"),
    KnownSetup("ddp", "torch-zip", "ckptmap.formats.torch_save.format:DDP"),
    KnownSetup("compiled", "torch-zip", "ckptmap.formats.torch_save.format:COMPILED"),
    KnownSetup("fsdp1", "dcp", "ckptmap.formats.dcp.writer:FSDP1"),
    KnownSetup(
        "fsdp1-local", "fsdp1-local", "ckptmap.formats.rank_files.fsdp1_local_writer:FSDP1_LOCAL"
    ),
    KnownSetup("fsdp2", "dcp", "ckptmap.formats.dcp.writer:FSDP2"),
    KnownSetup("fsdp2-ranks", "rank-files", "ckptmap.formats.rank_files.writer:FSDP2_RANKS"),
    KnownSetup("dcp-hf", "dcp-hf", "ckptmap.formats.dcp.safetensors_writer:DCP_HF"),
    KnownSetup(
        "accelerate", "accelerate", "ckptmap.formats.frameworks.directory_writers:ACCELERATE"
    ),
    KnownSetup(
        "accelerate-full",
        "accelerate-full",
        "ckptmap.formats.frameworks.directory_writers:ACCELERATE_FULL",
    ),
    KnownSetup("trainer", "trainer", "ckptmap.formats.frameworks.directory_writers:TRAINER"),
    KnownSetup("gguf", "gguf", "ckptmap.formats.gguf.writer:GGUF"),
)
LIVE_FORMS = (  # of quantized weights in a live model, asked in this order
    "ckptmap.live.quantized.bnb:BnbForm",
    "ckptmap.live.quantized.nf4:NF4Form",
    "ckptmap.live.quantized.int8_training:TrainedInt8Form",
    "ckptmap.live.quantized.int8:Int8Form",
)
OPTIMIZER_FAMILIES = (  # of live optimizers, asked in this order: the last one accepts any
    "ckptmap.live.optimizer.torchao_adam:TorchaoAdam",
    "ckptmap.live.optimizer.bnb:ADAM",
    "ckptmap.live.optimizer.bnb:ADEMAMIX",
    "ckptmap.live.optimizer.bnb:LION",
    "ckptmap.live.optimizer.bnb:SGD",
    "ckptmap.live.optimizer.bnb:RMSPROP",
    "ckptmap.live.optimizer.bnb:ADAGRAD",
    "ckptmap.live.optimizer.torch_optim:TorchAdam",
    "ckptmap.live.optimizer.torch_optim:TorchSgd",
    "ckptmap.live.optimizer.torch_optim:TorchAdafactor",
    "ckptmap.live.optimizer.lbfgs:TorchLbfgs",
    "ckptmap.live.optimizer.any_optimizer:AnyOptimizer",
)
GROUPS = (
    "containers", "directories", "writers", "layouts", "schemes", "key_forms", "unflatteners",
    "live_forms", "optimizer_families", "setups", "value_ops",
)  # fmt: skip
"""Entry-point groups, each with `ckptmap.` before it."""
RUNNER = "ckptmap.operations.convert:run"
CARDS = "ckptmap.operations.report.cards:html_of"


@cache
def _load(spec: str) -> Any:
    module, _, name = spec.partition(":")
    value = getattr(importlib.import_module(module), name)
    return value() if isinstance(value, type) else value


@cache
def _has_third_party() -> bool:
    """Return whether any installed distribution has entry points of a ckptmap group.

    This search in the files is ten times faster than importlib.metadata, which is used only after
    it.
    """
    return any(
        b"[ckptmap." in _content(file)
        for directory in map(Path, sys.path)
        if directory.is_dir()
        for file in directory.glob("*.dist-info/entry_points.txt")
    )


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # somebody else's distribution, half removed
        return b""


@dataclass(frozen=True)
class BrokenEntryPoint:
    """An entry point that cannot be loaded: which one, of which distribution, and why."""

    distribution: str
    group: str
    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.distribution}: its entry point {self.name} = {self.value} in {self.group}"
            f" cannot be loaded and is skipped: {self.why}"
        )


_BROKEN: dict[tuple[str, str, str], BrokenEntryPoint] = {}


def loaded(entry: EntryPoint) -> Any | None:
    """Return the object of an entry point, an instance where it names a class.

    None: loading it failed. Then it is kept for `broken_entry_points`, and a RuntimeWarning names
    its distribution: what another package does wrong must not end a run that does not need it.
    """
    try:
        value = entry.load()
        return value() if isinstance(value, type) else value
    except (Exception, SystemExit) as error:
        dist = entry.dist
        whose = "an unnamed distribution" if dist is None else f"{dist.name} {dist.version}"
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        broken = BrokenEntryPoint(whose, entry.group, entry.name, entry.value, why)
        if _BROKEN.setdefault((entry.group, entry.name, entry.value), broken) is broken:
            warnings.warn(f"{broken}; see ckptmap doctor", RuntimeWarning, stacklevel=2)
        return None


def broken_entry_points() -> tuple[BrokenEntryPoint, ...]:
    """Return the entry points that cannot be loaded, after all of ckptmap's groups were tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in GROUPS:
            _third_party(group)
    return tuple(_BROKEN.values())


@cache
def _third_party(group: str) -> tuple[Any, ...]:
    if not _has_third_party():
        return ()
    from importlib.metadata import entry_points

    values = [loaded(entry) for entry in entry_points(group=f"ckptmap.{group}")]
    return tuple(value for value in values if value is not None)


def _all(specs: Iterable[str], group: str) -> Iterator[Any]:
    yield from _third_party(group)
    yield from map(_load, specs)


def _asked(known: Iterable[Known], group: str, place: Place) -> Iterator[Any]:
    """Yield the formats that may claim a place. A module of this package is imported only for these."""
    return _all((one.spec for one in known if one.may_claim(place)), group)


def container_for(place: Place) -> Container | None:
    """Return the file format that claims the place; None if none does."""
    for container in _asked(CONTAINERS, "containers", place):
        if container.claims(place):
            return cast(Container, container)
    return None


def directory_for(place: Place) -> Directory | None:
    """Return the framework that claims the place as its directory; None if none does.

    Frameworks are asked before containers, because their directories hold containers.
    """
    for directory in _asked(DIRECTORIES, "directories", place):
        if directory.claims(place):
            return cast(Directory, directory)
    return None


def knows(place: Place) -> bool:
    """Return whether any framework or format recognizes the place as a checkpoint."""
    return directory_for(place) is not None or container_for(place) is not None


def schemes() -> tuple[Scheme, ...]:
    return tuple(_all((known.spec for known in SCHEMES), "schemes"))


def schemes_in(lasts: Collection[str], stated: Collection[object]) -> Iterator[Scheme]:
    """Yield the schemes that may find weights, in the order of the registry; only their modules are imported.

    lasts   the last segments of the keys of all stored tensors
    stated  the schemes that encoding records name
    """
    return _all((known.spec for known in SCHEMES if known.may_read(lasts, stated)), "schemes")


def schemes_named(*suffixes: str) -> tuple[Scheme, ...]:
    """Return the schemes of one of these suffixes; only their modules are imported."""
    found = _all((known.spec for known in SCHEMES if known.suffix in suffixes), "schemes")
    return tuple(scheme for scheme in found if scheme.suffix in suffixes)


def schemes_of_method(method: object) -> tuple[Scheme, ...]:
    """Return the schemes that may carry over what a config of this `quant_method` declares beside weights."""
    return tuple(_all((one.spec for one in SCHEMES if method and one.method == method), "schemes"))


def layouts() -> tuple[Layout, ...]:
    return tuple(_all(LAYOUTS, "layouts"))


def unflatteners() -> tuple[Any, ...]:
    """Return the unflatteners; `ckptmap.sharding.reference_model.unflatteners` has their type."""
    return tuple(_all(UNFLATTENERS, "unflatteners"))


def key_forms() -> tuple[Any, ...]:
    """Return the key forms of optimizer state; `ckptmap.optim.state.key_forms` has their type."""
    return tuple(_all(KEY_FORMS, "key_forms"))


def live_forms() -> tuple[Any, ...]:
    """Return the live forms; `ckptmap.live.model.live_form.live_forms` has their type."""
    return tuple(_all(LIVE_FORMS, "live_forms"))


def optimizer_families() -> tuple[Any, ...]:
    """Return the families of live optimizers (`ckptmap.live.optimizer.family.OptimizerFamily`)."""
    return tuple(_all(OPTIMIZER_FAMILIES, "optimizer_families"))


def runner() -> Callable[..., Any]:
    """Return the function that executes a plan: `ckptmap.operations.convert.run`.

    It is loaded by name, because planning may not import operations.
    """
    return cast(Callable[..., Any], _load(RUNNER))


def card(value: object) -> str:
    """Return what a notebook shows of a checkpoint, a plan or a report, as HTML.

    `ckptmap.operations.report.cards` makes it; it is loaded by name, as `runner` is.
    """
    return cast(str, _load(CARDS)(value))


def setups() -> tuple[Setup, ...]:
    return tuple(_all((known.spec for known in SETUPS), "setups"))


def setups_named(text: str) -> tuple[Setup, ...]:
    """Return the setups that a value of `--to` may begin with. The modules of others are not imported."""
    known = [one.spec for one in SETUPS if text == one.name or text.startswith(f"{one.name}-")]
    return tuple(_all(known, "setups"))


def setups_of(writer: str) -> tuple[Setup, ...]:
    """Return the setups of a writer. The modules of other writers are not imported."""
    found = _all((known.spec for known in SETUPS if known.writer == writer), "setups")
    return tuple(setup for setup in found if setup.writer == writer)


def layout(name: str) -> Layout:
    return next(cast(Layout, each) for each in _all(LAYOUTS, "layouts") if each.name == name)


def writer(name: str) -> Writer:
    return next(cast(Writer, each) for each in _all(WRITERS, "writers") if each.name == name)
