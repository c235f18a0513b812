"""The table of schemes says by which keys and records each finds weights: others are not asked, nor imported."""

from __future__ import annotations

import pytest

from ckptmap import registry
from ckptmap.core.encoding_records import EncodingRecords
from ckptmap.core.stored_parts import StoredParts
from ckptmap.errors import CkptmapError
from ckptmap.known_schemes import SCHEMES, KnownScheme
from ckptmap.protocols import Scheme

STATED = sorted({name for known in SCHEMES for name in known.records})
KINDS = (
    "Int8Tensor", "Float8Tensor", "MXTensor", "NVFP4Tensor", "AffineQuantizedTensor", "Int4Tensor",
)  # fmt: skip
"""The classes that torchao's records name."""


class Asked(StoredParts):
    """No tensors; it notes which ends of keys are looked for."""

    def __init__(self) -> None:
        super().__init__({})
        self.ends: list[str] = []

    def by_last(self, *ends, dtypes=None):  # type: ignore[no-untyped-def]
        self.ends += ends
        return super().by_last(*ends, dtypes=dtypes)

    def __iter__(self):  # type: ignore[no-untyped-def]
        pytest.fail("all keys are looked through")


def scheme_of(known: KnownScheme) -> Scheme:
    names = [one.spec for one in SCHEMES]
    return registry.schemes()[len(registry.schemes()) - len(names) + names.index(known.spec)]


@pytest.mark.parametrize("known", SCHEMES, ids=lambda known: known.spec)
def test_the_table_names_every_end_that_a_scheme_looks_for(known: KnownScheme) -> None:
    stored = Asked()
    assert not scheme_of(known).group(stored, EncodingRecords())
    lasts = {end.rpartition(".")[2] for end in stored.ends}
    assert all(known.may_read([f"x{last}"], ()) for last in lasts)
    assert all(any(last.endswith(end) for last in lasts) for end in known.ends)
    assert not known.may_read(["weight", "bias", "in_proj_weight"], ("unknown",))


def takes(scheme: Scheme, record: dict[str, object]) -> bool:
    """Whether a scheme takes such a record: here it finds no parts, and says so."""
    try:
        return bool(scheme.group(StoredParts({}), EncodingRecords({"fc.weight": record})))
    except CkptmapError:
        return True


@pytest.mark.parametrize("known", SCHEMES, ids=lambda known: known.spec)
def test_the_table_names_every_record_that_a_scheme_takes(known: KnownScheme) -> None:
    scheme = scheme_of(known)
    taken = {
        name
        for name in {*STATED, scheme.name}
        for kind in (KINDS if name == "torchao" else ("",))
        if takes(scheme, {"scheme": name, "kind": kind, "names": ["qdata", "scale"], "data": {}})
    }
    if known.spec.endswith("Fp8ExponentScheme"):
        taken.add("fp8")  # of codes that `Fp8Scheme`, which is asked before, has left
    if known.spec.endswith("Float8E5m2Scheme"):
        taken.add("torchao")  # if there are codes, of its dtype
    assert taken == {*known.records}


def test_only_what_may_find_weights_is_asked() -> None:
    names = [scheme.name for scheme in registry.schemes_in(["weight", "weight_scale_inv"], ())]
    assert names[-3:] == ["fp8", "fp8-ue8m0", "fp8-fp4"]
    assert not [*registry.schemes_in(["weight", "bias"], ())][
        len(registry._third_party("schemes")) :
    ]


@pytest.mark.parametrize("known", SCHEMES, ids=lambda known: known.spec)
def test_the_table_names_the_suffix_of_each_scheme_and_the_configs_that_it_carries_over(
    known: KnownScheme,
) -> None:
    scheme = scheme_of(known)
    assert known.suffix == scheme.suffix
    config = {"kv_cache_scheme": {"num_bits": 8}, "config_groups": {}, "sparsity_config": {"a": 1}}
    names = ["layers.0.self_attn.k_scale", "layers.0.self_attn.v_scale"]
    for method in ("compressed-tensors", "fp8", "gptq", "awq", "modelopt", "torchao", ""):
        beyond = getattr(scheme, "beyond_weights", lambda *_: {})
        carried = beyond({**config, "quant_method": method}, names)
        assert bool(carried) == bool(method and known.method == method)


@pytest.mark.parametrize("known", registry.SETUPS, ids=lambda known: known.name)
def test_the_table_names_each_setup_and_its_writer(known: registry.KnownSetup) -> None:
    (setup,) = (each for each in registry.setups_named(known.name) if each.name == known.name)
    assert setup.writer == known.writer
    assert setup in registry.setups_named(f"{known.name}-bf16")
