"""The base of schemes that are recognized and decoded, and that no `--to` names as a target."""

from __future__ import annotations

from typing import ClassVar

from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.tensors import Cut, Opaque, TensorInfo


class ReadOnlyScheme:
    """`unmade` says why values are not encoded so, and what to do instead."""

    suffix = ""
    unmade: ClassVar[str]

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return None: the library pickles no tensor subclass of its own."""
        return None

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        return None

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        return Refusal(self.unmade)
