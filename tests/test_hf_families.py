"""What transformers loads of quantized models that are no plain decoder: towers, T5, BART."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptmap
from ckptmap.errors import PlanError
from tests.bnb_cases import refused

TEXT = dict(
    model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
)  # fmt: skip
VISION = dict(
    model_type="clip_vision_model", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, image_size=32, patch_size=8, projection_dim=64,
)  # fmt: skip
T5 = dict(
    d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=128,
    decoder_start_token_id=0,
)  # fmt: skip
BART = dict(
    d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=128,
    max_position_embeddings=64,
)  # fmt: skip
IMAGE = dict(
    input_ids=torch.tensor([[1, 2] + [100] * 16 + [5, 6]]),
    pixel_values=torch.ones(1, 3, 32, 32, dtype=torch.bfloat16),
)
WORDS = dict(input_ids=torch.arange(8)[None], decoder_input_ids=torch.arange(4)[None])


def llava() -> Any:
    config = transformers.LlavaConfig(
        text_config=TEXT, vision_config=VISION, image_token_index=100, image_seq_length=16
    )
    return transformers.LlavaForConditionalGeneration(config)


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))


def bart() -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))


def saved(make: Any, path: Path) -> Any:
    torch.manual_seed(0)
    model = make().bfloat16().eval()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    ("make", "inputs", "scheme"),
    [
        (llava, IMAGE, "bnb-nf4"), (llava, IMAGE, "bnb-int8"), (llava, IMAGE, "ct-int8"),
        (llava, IMAGE, "ct-fp8"), (t5, WORDS, "bnb-nf4"), (t5, WORDS, "bnb-int8"),
        (bart, WORDS, "int8"), (bart, WORDS, "float8"),
    ],
)  # fmt: skip
def test_transformers_loads_and_runs_it(
    make: Any, inputs: dict[str, torch.Tensor], scheme: str, tmp_path: Path
) -> None:
    """The towers of Llava are called otherwise on disk than in memory, T5 holds `wo` in fp32, and
    BART has a buffer whose name has no dot."""
    model = saved(make, tmp_path / "in")
    left = ("vision_tower.*", "language_model.model.layers.0.*") if make is llava else ()
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{scheme}", no_encode=left)
    loaded, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    with torch.no_grad():
        theirs, found = model(**inputs).logits.float(), loaded(**inputs).logits.float()
    assert torch.cosine_similarity(found.flatten(), theirs.flatten(), 0) > 0.9
    encodings = {tensor.encoding for tensor in ckptmap.open(tmp_path / "out").values()}
    assert encodings == {scheme, "dense"}
    for name, value in model.named_parameters():
        if "vision_tower" in name or "language_model.layers.0." in name or ".wo." in name:
            assert torch.equal(loaded.get_parameter(name).to(value.dtype), value), name


def test_what_is_held_in_fp32_is_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    saved(t5, tmp_path / "in")
    with refused(PlanError, "CKM203", match=r"DenseReluDense\.wo\.weight: cannot be bnb-nf4"):
        ckptmap.plan(tmp_path / "in", "hf-bnb-nf4", encode=("*.wo.weight",))
