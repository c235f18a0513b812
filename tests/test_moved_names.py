"""What `ckptmap.tensors` still answers for, though it has moved."""

from __future__ import annotations

import pytest

from ckptmap import protocols, tensors


def test_index_is_still_found_where_it_was_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"ckptmap\.protocols\.Index now"):
        assert tensors.Index is protocols.Index  # type: ignore[attr-defined]


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Indexes'"):
        tensors.Indexes  # type: ignore[attr-defined]  # noqa: B018
