"""Tell which modules an adapter_config.json targets, by the rules of peft, and compare them with the file.

    target_modules ["q_proj"], the file holds up_proj.lora_A  ->  SourceError CKM320

peft gives low-rank matrices to the modules that the config targets, and ignores the file's matrices of any
other. Source of the rules: `check_target_module_exists` in peft/tuners/tuners_utils.py, 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

ALL_LINEAR = "all-linear"
_COSTLY = re.compile(r"\)[*+{]|(?:[*+{].*){5}")
_MAX_PATTERN = 1000
_INDEX = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


@dataclass(frozen=True)
class Targets:
    """The modules that a config names; the fields are those of peft's LoraConfig.

    names   ends of module names; None where it is a pattern, or is not stated
    pattern a regular expression of whole names; None where it is a list, or is not stated
    layers  indices of the layers that are meant; None: all
    """

    names: tuple[str, ...] | None = None
    pattern: str | None = None
    excluded: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None
    layers_patterns: tuple[str, ...] = ()

    @property
    def is_stated(self) -> bool:
        return self.names is not None or (
            self.pattern is not None and self.pattern.lower() != ALL_LINEAR
        )

    def costly(self) -> str | None:
        """Return the first pattern that may take without end to match, or is none; None: there is none."""
        patterns = [self.pattern, *self.layers_patterns]
        patterns += [self.excluded] if isinstance(self.excluded, str) else []
        return next((p for p in patterns if p is not None and not _is_quick(p)), None)

    def match(self, module: str) -> bool:
        """Return whether peft gives the module low-rank matrices."""
        if isinstance(self.excluded, str):
            if re.fullmatch(self.excluded, module):
                return False
        elif _ends(module, self.excluded):
            return False
        if self.pattern is not None:
            return re.fullmatch(self.pattern, module) is not None
        names = self.names or ()  # a whole name is meant whatever the layers are
        return module in names or (_ends(module, names) and self._is_layer(module))

    def _is_layer(self, module: str) -> bool:
        if not self.layers:
            return True
        tries = [re.compile(rf"(?:^|.*?\.){p}\.(?P<index>\d+)\.") for p in self.layers_patterns]
        for pattern in tries or [_INDEX]:
            match = pattern.match(module)
            if match is not None:
                return int(match["index"]) in self.layers
        return False


def _is_quick(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return len(pattern) <= _MAX_PATTERN and not _COSTLY.search(pattern)


def _ends(module: str, names: Collection[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def untargeted(targets: Targets, modules: Collection[str]) -> list[str]:
    """Return the modules that the config does not target although the file holds matrices of them.

    Where a pattern matches none of them the names of the model have changed since: an empty list.
    """
    if not targets.is_stated or targets.costly() is not None:
        return []
    strangers = [module for module in modules if not targets.match(module)]
    return [] if targets.pattern is not None and len(strangers) == len(modules) else strangers
