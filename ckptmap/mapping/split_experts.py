"""The naming scheme of a mixture of experts in memory, for families that differ from their names on disk in nothing else.

    model.layers.1.mlp.experts.gate_up_proj [e, 2m, i]                       in memory: all experts of a layer in one tensor
    model.layers.1.mlp.experts.3.{gate,up}_proj.weight [m, i], two tensors   on disk, as releases have them

No mapping file lists the weights of these families: the rules are made of the names that a model has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptmap.core.tensor_table import NUMBER
from ckptmap.mapping.mapping_file import parse_scheme
from ckptmap.mapping.rules import NamingScheme

_FAMILIES = """
afmoe cohere2_moe deepseek_v2 flex_olmo glm4_moe glm4_moe_lite glm4v_moe jamba mellum olmoe qwen3_5_moe_text qwen3_next
qwen4_exp_text solar_open
"""
FAMILIES = frozenset(_FAMILIES.split())
"""Values of `model_type`. Seen by building each with transformers 5.23 on meta, and asking which names it saves."""
JOINED, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_CAPTURES = "nabcdfgh"


def memory_scheme_of(
    keys: Collection[str], config: Mapping[str, object] | None
) -> NamingScheme | None:
    """Return the scheme of a model that has these names in memory; None: it is of no such family, or has other names."""
    kind = str((config or {}).get("model_type"))
    if kind not in FAMILIES or not any(key.endswith(JOINED) for key in keys):
        return None
    rules = [_rule(name) for name in dict.fromkeys(map(_pattern, keys))]
    head = f'schema = 1\nfamily = "{kind}"\nscheme = "hf-memory"\n'
    return parse_scheme("\n".join([head, *rules]), f"{kind}/hf-memory")


def _pattern(key: str) -> str:
    """Return the name with a capture in place of each number."""
    captures = iter(_CAPTURES)
    return NUMBER.sub(lambda _: f"{{{next(captures)}}}", key)


def _rule(name: str) -> str:
    """Return the rule of a name in memory; a layer without experts has none of the names of one."""
    disk, memory = f'"{name}"', name
    if name.endswith(JOINED):
        expert = f"{name.removesuffix(JOINED)}.experts.{{e}}"
        halves = (f'"{expert}.{half}_proj.weight :: m i @ two[{at}]"' for at, half in _HALVES)
        disk, memory = f"[{', '.join(halves)}]", f"{name} :: e (two m) i"
    elif name.endswith(DOWN):
        expert = f"{name.removesuffix(DOWN)}.experts.{{e}}"
        disk, memory = f'"{expert}.down_proj.weight :: i m"', f"{name} :: e i m"
    optional = '\noptional = "any"' * ("{" in name)
    return f'[[rule]]\nhf = {disk}\nhf-memory = "{memory}"{optional}\n'


_HALVES = ((0, "gate"), (1, "up"))
