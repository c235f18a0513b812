"""List the output layers ("heads") whose weight transformers ties to the input embedding.

No file holds the weight of such a layer. The quantization settings in a config must name the layer
as not quantized, or the loader looks for quantized codes of it.

    cls.predictions.transform.dense.weight is stored    -> cls.predictions.decoder is such a layer

Source: `_tied_weights_keys` of transformers 5.23. A listed name that no module has does no harm.
"""

from __future__ import annotations

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


def of_config(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the heads of a model of this config; none if the config states that they are not tied."""
    if states_tied(config) is False:
        return ()
    kind = _OF_TYPE.get(str(config.get("model_type")))
    more = ("proj_out",) if config.get("is_encoder_decoder") is True else ()
    return tuple(dict.fromkeys((_EVERYWHERE, *more, *((kind,) if kind else ()))))


def unstored(names: Collection[str], heads: Collection[str]) -> list[str]:
    """Return the heads without a stored weight, for a checkpoint of the keys `names`.

    Candidates are `heads` and, if there are any, the heads inside modules of these keys. A stored
    bias does not count: files hold the bias of a tied layer.
    """
    written = {s for name in names if not name.endswith(".bias") for s in name.split(".")}
    candidates = [head for head in heads if head not in written]
    if heads:
        candidates += dict.fromkeys(_within(names))
    return [head for head in candidates if f"{head}.weight" not in names]


def _within(names: Collection[str]) -> Iterator[str]:
    for name in names:
        path = name.split(".")
        for at, segment in enumerate(path[:-2]):
            if segment in _WITHIN:
                yield ".".join((*path[: at + 1], _WITHIN[segment]))
