"""Compare the modules that an adapter's config names with those of its file and of the base."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.lora.adapter_files import Adapter
from ckptmap.checkpoint.lora.targets import untargeted
from ckptmap.checkpoint.lora.untied_head import is_head
from ckptmap.core.formatting import some
from ckptmap.core.printable import advised
from ckptmap.errors import SourceError


def require_targeted(adapter: Adapter) -> None:
    """Raise SourceError CKM320 for matrices of a module that the config does not target: peft ignores them."""
    config, targets = adapter.config, adapter.config.targets
    modules = {low.module: low for low in adapter.lows.values() if not low.wrapped}
    if config.ties:  # peft gives a tied head the matrices of its embedding
        modules = {name: low for name, low in modules.items() if not is_head(f"{name}.weight")}
    strangers = untargeted(targets, modules)
    if not strangers:
        return
    stated = f"target_modules {targets.pattern or list(targets.names or ())}"
    stated += f", exclude_modules {targets.excluded}" if targets.excluded else ""
    stated += f", layers_to_transform {list(targets.layers)}" if targets.layers else ""
    raise SourceError(
        "CKM320",
        f"{config.file}: states {stated[:300]}, but {adapter.path} holds {some([modules[name].a.fqn for name in strangers], 1)}:"
        " peft ignores the matrices of modules that are not targeted",
        "give the adapter_config.json that was saved with it: --adapter-config PATH; or leave them out:"
        f" {' '.join(advised(leave=name) for name in strangers[:4])}",
    )


def target_notes(adapter: Adapter, base: Checkpoint, named: Callable[[str], str]) -> Iterator[str]:
    """Yield notes on what the config names and the file does not hold, or what could not be compared.

    `named` maps the adapter's names of tensors to the base's.
    """
    matrices = [
        fqn.removesuffix(".weight")
        for fqn, info in base.infos().items()
        if fqn.endswith(".weight") and len(info.shape) == 2
    ]
    notes = [*_patterns(adapter), *_lacking(adapter, matrices, named), *_wholes(adapter, matrices)]
    yield from (f"{adapter.config.file}: {note}" for note in notes)


def _patterns(adapter: Adapter) -> Iterator[str]:
    """Yield the patterns of ranks and of alphas that match no module; the file may then be another's."""
    config, modules = adapter.config, [low.module for low in adapter.lows.values()]
    settings = {"rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern}
    for setting, patterns in settings.items():
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", module) for module in modules):
                yield f"{setting}: {pattern!r} matches no module of which the file holds matrices"


def _lacking(adapter: Adapter, matrices: list[str], named: Callable[[str], str]) -> Iterator[str]:
    """Yield a note on modules of the base that the config targets and the file has no matrices of."""
    targets, modules = adapter.config.targets, [low.module for low in adapter.lows.values()]
    if not targets.is_stated or not modules:
        return
    costly = targets.costly()
    if costly is not None:
        yield f"the targeted modules are not compared with the file: a costly pattern, {costly[:80]!r}"
        return
    if targets.pattern is not None and not any(map(targets.match, modules)):
        yield f"target_modules {targets.pattern[:80]!r} matches no module of which the file holds matrices"
        return
    held = (*modules, *adapter.left)
    known = {named(f"{module}.weight").removesuffix(".weight") for module in held}
    # Each expert is a module on disk; in memory they may be one, which peft does not target by name.
    lacking = [
        module
        for module in matrices
        if module not in known and ".experts." not in module and targets.match(module)
    ]
    if lacking:
        yield f"target_modules names {some(lacking, 1)}, of which the file holds no matrices"


def _wholes(adapter: Adapter, matrices: list[str]) -> Iterator[str]:
    """Yield a note on modules of the base that were trained as a whole and that the file does not hold."""
    there = {f".{name.rpartition('.')[0]}" for name in (*adapter.trained, *adapter.left)}
    for name in adapter.config.text.get("modules_to_save") or ():
        of_base = [module for module in matrices if f".{module}".endswith(f".{name}")]
        if of_base and not any(module.endswith(f".{name}") for module in there):
            yield f"modules_to_save names {of_base[0]}, of which the file holds nothing"
