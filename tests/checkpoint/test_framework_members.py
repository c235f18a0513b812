"""What holds for every reader, because it is asked in one place."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from ckptmap import registry
from ckptmap.checkpoint.framework_members import index_of
from ckptmap.formats.detect import look


def test_readers_make_their_objects_without_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    place = look(tmp_path / "a.pt")
    container = registry.container_for(place)
    assert container is not None
    seen: list[bool] = []

    class Watched:
        def index(self, given: object) -> object:
            assert given is place
            seen.append(gc.isenabled())
            return container.index(place)

    monkeypatch.setattr(registry, "container_for", lambda _: Watched())
    assert gc.isenabled()
    assert [*index_of(place).leaves] == [("w",)]
    assert seen == [False] and gc.isenabled()
