"""Output layers whose weight transformers ties to the input embedding, so that no file holds it: what
quantizes modules must be told to leave them, or the loader looks for codes of theirs.

    cls.predictions.transform.dense.weight is stored    -> cls.predictions.decoder is such a layer

By `_tied_weights_keys` of transformers 5.23. A name that is no module's does no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

_EVERYWHERE = "lm_head"
_OF_TYPE: Mapping[str, str] = {
    "biogpt": "output_projection", "convbert": "generator_lm_head",
    "distilbert": "vocab_projector", "electra": "generator_lm_head",
    "fsmt": "decoder.output_projection", "git": "output", "modernbert": "decoder",
    "modernbert-decoder": "decoder", "rwkv": "head", "speecht5": "text_decoder_postnet.lm_head",
    "trocr": "output_projection", "xlnet": "lm_loss",
}  # fmt: skip
_WITHIN: Mapping[str, str] = {
    "predictions": "decoder", "entity_predictions": "decoder", "lm_head": "decoder",
    "mlm_score": "decoder", "pred_layer": "proj",
}  # fmt: skip
"""Module -> the one in it that is tied; BERT, ALBERT, RoBERTa, XLM and their kin."""


def of_config(config: Mapping[str, object]) -> tuple[str, ...]:
    """Those of models that the config does not say to be untied."""
    text = config.get("text_config")
    if any(c.get("tie_word_embeddings") is False for c in (config, text) if isinstance(c, Mapping)):
        return ()
    kind = _OF_TYPE.get(str(config.get("model_type")))
    more = ("proj_out",) if config.get("is_encoder_decoder") is True else ()
    return (_EVERYWHERE, *more, *((kind,) if kind else ()))


def unstored(names: Collection[str], heads: Collection[str]) -> list[str]:
    """Of `heads`, and of heads that lie in modules of these keys, those without a weight there. The
    bias of a tied layer is stored."""
    written = {s for name in names if not name.endswith(".bias") for s in name.split(".")}
    found = [head for head in heads if head not in written]
    if heads:
        found += dict.fromkeys(_within(names))
    return [head for head in found if f"{head}.weight" not in names]


def _within(names: Collection[str]) -> Iterator[str]:
    for name in names:
        path = name.split(".")
        for at, segment in enumerate(path[:-2]):
            if segment in _WITHIN:
                yield ".".join((*path[: at + 1], _WITHIN[segment]))
