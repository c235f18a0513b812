"""List every key that a mapping file expects of a model, with its shape: each rule for each value of its captures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from ckptmap.mapping.completeness import capture_ranges
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expressions import Expr, Unknown
from ckptmap.mapping.rearrange import example_sources, stacked_captures
from ckptmap.mapping.rule_errors import DIM, missing_config
from ckptmap.mapping.rules import NamingScheme, Rule, Term
from ckptmap.tensors import TensorInfo

TYPICAL: Mapping[str, object] = {
    "num_hidden_layers": 2, "hidden_size": 60, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 10, "intermediate_size": 56, "vocab_size": 102, "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 26, "num_experts": 5, "num_local_experts": 5,
    "n_routed_experts": 5, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 14, "kv_lora_rank": 22, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 11, "intermediate_size_mlp": 58, "n_layer": 2, "n_embd": 60, "n_head": 12, "n_positions": 64,
    "max_position_embeddings": 64, "use_parallel_residual": False,
    "vision_config": {
        "num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 34, "num_channels": 5,
        "image_size": 28, "patch_size": 7, "projector_input_dim": 27, "projector_output_dim": 23,
        "vision_output_dim": 25,
    },
}  # fmt: skip
"""The config of a tiny model with pairwise different sizes, for mapping files without a config."""
FREE = 13
"""The extent given to the first axis of unknown size; the next one gets one more."""


def expected_tensors(
    scheme: NamingScheme, config: Mapping[str, object], *, hub: bool, dtype: str = "float32"
) -> dict[str, TensorInfo]:
    """Return the keys of one side with shape and `dtype`, in the order of the rules.

    Optional keys are included; keys that the config ties to another are not. Raises PlanError CKM605
    where the config lacks a value.
    """
    dims = _Sizes(scheme, config)
    ties = [tie for tie in scheme.ties if tie.hub == hub and not tie.written]
    left = {tie.name.text for tie in ties if dims.holds(tie.when)}
    tensors: dict[str, TensorInfo] = {}
    words = list(dict.fromkeys(rule.either for rule in scheme.rules if rule.either))
    for rule in scheme.rules:
        if dims.holds(rule.when) is False:
            continue
        for key, shape in _keys(scheme, rule, hub, dims, words):
            if key not in left:
                tensors[key] = TensorInfo(shape, dtype)
    return tensors


def _keys(
    scheme: NamingScheme, rule: Rule, hub: bool, dims: Dims, words: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        known = capture_ranges(rule, dims)
        ends = [known.get(name) or (0, dims.number(_count(scheme, name))) for name in rule.shared]
    except Unknown as unknown:
        raise missing_config(scheme, unknown.names, rule.label) from unknown
    sources: list[tuple[Term, dict[str, int], tuple[int, ...]]] = []
    if rule.side(hub)[0].axes is None:  # any shape will do
        sources += [(term, {}, (FREE,)) for term in rule.side(hub)]
    else:
        for source in example_sources(scheme, rule, hub, dims):
            stack = dict(zip(stacked_captures(rule, hub), source.stack, strict=True))
            sources.append((rule.side(hub)[source.term], stack, source.info.shape))
    for numbers in product(*(range(low, end) for low, end in ends)):
        if rule.either and words[numbers[0] % len(words)] != rule.either:
            continue  # one layer of each kind, by turns
        captures = dict(zip(rule.shared, numbers, strict=True))
        for term, stack, shape in sources:
            name = term.names[0]
            yield name.render({**captures, **stack}, name.shifts(dims)), shape


def _count(scheme: NamingScheme, capture: str) -> Expr:
    """Return the expression that counts a capture. Raises Unknown where `[dims]` has none."""
    if capture not in scheme.dims:
        raise Unknown(f"{DIM}{capture!r}")
    return scheme.dims[capture]


class _Sizes(Dims):
    """Dims that invent an extent for axes which only the shapes of a checkpoint would determine."""

    def __init__(self, scheme: NamingScheme, config: Mapping[str, object]) -> None:
        super().__init__(scheme.dims, config)
        terms = [term for rule in scheme.rules for term in (*rule.hub, *rule.other)]
        self._sliced = {cut.axis for term in terms for cut in term.slices}
        self._free: dict[str, int] = {}

    def size(self, axis: str) -> int | None:
        size = super().size(axis)
        if size is not None or axis in self._exprs or axis in self._sliced:
            return size
        return self._free.setdefault(axis, FREE + len(self._free))
