"""List the layers whose weight transformers ties to another: output layers ("heads") to the input embedding, mostly.

No file holds the weight of such a layer. The quantization settings in a config must name the layer
as not quantized, or the loader looks for quantized codes of it.

    cls.predictions.transform.dense.weight is stored    -> cls.predictions.decoder is such a layer

    language_model.model.decoder.embed_tokens.weight       -> language_model.lm_head may be one, too
    layers.5.shared_transformer.self_attn.q_proj.weight    -> so may its kin in layers 0 to 11

Source: `_tied_weights_keys` of transformers 5.23. A listed name that no module has does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ckptmap.formats.huggingface.tied_embeddings import states_tied

_EVERYWHERE = "lm_head"
_OF_TYPE: Mapping[str, str] = {
    "bert-generation": "lm_head.decoder", "biogpt": "output_projection", "convbert": "generator_lm_head",
    "distilbert": "vocab_projector", "electra": "generator_lm_head",
    "fsmt": "decoder.output_projection", "git": "output", "gpt_neox_japanese": "embed_out",
     "modernbert": "decoder",
    "modernbert-decoder": "decoder", "rwkv": "head", "speecht5": "text_decoder_postnet.lm_head",
    "trocr": "output_projection", "whisper": "proj_out", "xlnet": "lm_loss",
}  # fmt: skip
_WITHIN: Mapping[str, str] = {
    "predictions": "decoder", "entity_predictions": "decoder", "lm_head": "decoder",
    "mlm_score": "decoder", "pred_layer": "proj",
}  # fmt: skip
"""Module -> the tied layer inside it, in BERT, ALBERT, RoBERTa, XLM and related models."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EMBEDDINGS = ("embed_tokens", "embed_in", "shared", "wte")
"""What the embeddings of language models within others are called; those of BERT have heads as in `_WITHIN`."""
SHARED: Mapping[str, str] = {
    "diffusion_gemma": "decoder.layers", "zamba": "shared_transf", "zamba2": "shared_transformer",
}  # fmt: skip
"""Model types: the segments of a block that several layers of the model share; the file holds it once."""
_TWINS = (".decoder.layers.", ".encoder.language_model.layers.")
"""Two modules of DiffusionGemma that share all their weights, under the names of the first; the second has buffers too."""
_DECODER = "decoder"
"""The section, and the module, of the model that writes, in one of two models (`vision-encoder-decoder`)."""
_OUTERMOST = ("model", "transformer")
_BLOCKS = frozenset(block for block in SHARED.values() if "." not in block)


def of_config(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the heads of a model of this config, and of the decoder within it, which has a config of its own;
    none if the config states that they are not tied."""
    inner = config.get(_DECODER)
    within = (
        tuple(f"{_DECODER}.{head}" for head in of_config(inner))
        if isinstance(inner, Mapping)
        else ()
    )
    if states_tied(config) is False:
        return within
    kind = _OF_TYPE.get(str(config.get("model_type")))
    more = ("proj_out",) if config.get("is_encoder_decoder") is True else ()
    return tuple(dict.fromkeys((_EVERYWHERE, *more, *((kind,) if kind else ()), *within)))


def unstored(names: Collection[str], heads: Collection[str]) -> list[str]:
    """Return the heads without a stored weight, for a checkpoint of the keys `names`.

    Candidates are `heads` and, if there are any, the heads inside modules of these keys. A stored
    bias does not count: files hold the bias of a tied layer.
    """
    written = {s for name in names if not name.endswith(".bias") for s in name.split(".")}
    candidates = [head for head in heads if head not in written]
    if heads:
        candidates += dict.fromkeys(_within(names))
        candidates += dict.fromkeys(_beside_embeddings(names))
    return [head for head in candidates if f"{head}.weight" not in names]


def copies(modules: Collection[str], names: Collection[str]) -> list[str]:
    """Return the modules that share the weight of one of these, in other layers of a checkpoint of the keys `names`."""
    made = set(_twins(modules, names))
    shared = [name for name in modules if not _BLOCKS.isdisjoint(name.split("."))]
    numbers = {match[1] for match in map(_LAYER.search, names) if match} if shared else set()
    made |= {_LAYER.sub(f".layers.{number}.", name, 1) for name in shared for number in numbers}
    return sorted(made.difference(modules))


def _twins(modules: Collection[str], names: Collection[str]) -> Iterator[str]:
    """Yield the modules of the second of two stacks of layers that share the weights of the first."""
    first, second = _TWINS
    if any(second in name for name in names):
        yield from (name.replace(first, second, 1) for name in modules if first in name)


def _beside_embeddings(names: Collection[str]) -> Iterator[str]:
    """Yield the name that the head of a language model within another has."""
    for name in names:
        path = name.split(".")
        inner = len(path) > 3 or path[0] == "decoder"
        if (
            path[-1] == "weight"
            and path[-2:-1]
            and path[-2] in _EMBEDDINGS
            and inner
            and path[0] not in _OUTERMOST
        ):
            yield f"{path[0]}.{_EVERYWHERE}"


def _within(names: Collection[str]) -> Iterator[str]:
    for name in names:
        path = name.split(".")
        for at, segment in enumerate(path[:-2]):
            if segment in _WITHIN:
                yield ".".join((*path[: at + 1], _WITHIN[segment]))
