"""transformers loads quantized models that are no plain decoder: vision towers, T5, BART, ViT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.huggingface.loaded_names import UNKNOWN
from tests.support.bnb_cases import refused
from tests.support.mask2former import mask2former

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
KNOWN = """
aria audioflamingo3 axk1 aya_vision dinov3_vit ernie4_5_moe esm exaone exaone_moe flint fuyu gemma3
gemma3n_text glmasr got_ocr2 granitemoe granitemoehybrid granitemoeshared hy_v3 internvl kolibri1
llava llava_next llava_next_video llava_onevision mimo_v2_flash minimax minimax_m2 mistral3
mixtral mlcd mllama musicflamingo nemotron_h olmo_hybrid paligemma phimoe pp_chart2table
qwen2_5_omni_thinker qwen2_audio qwen3_5_moe_text qwen3_5_text swin video_llava videomae vipllava
voxtral voxtral_realtime yolos
"""
"""Model types that transformers renames and `loaded_names.RENAMINGS` knows, or whose layers keep theirs."""
IMAGE = dict(
    input_ids=torch.tensor([[1, 2] + [100] * 16 + [5, 6]]),
    pixel_values=torch.ones(1, 3, 32, 32, dtype=torch.bfloat16),
)
VIT = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    image_size=32, patch_size=8,
)  # fmt: skip
QWEN_TEXT = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=160,
    rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
)  # fmt: skip
QWEN_VISION = dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4, patch_size=8, mlp_ratio=2)
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


def vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))


def dinov2() -> Any:
    config = transformers.Dinov2Config(**VIT, use_swiglu_ffn=True)
    return transformers.Dinov2ForImageClassification(config)


def qwen2_vl() -> Any:
    tokens = dict(image_token_id=150, video_token_id=151, vision_start_token_id=152)
    config = transformers.Qwen2VLConfig(
        text_config=QWEN_TEXT, vision_config=QWEN_VISION, **tokens, vision_end_token_id=153
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def aria() -> Any:
    """Its projector holds torch's MultiheadAttention, whose `out_proj` no library may quantize."""
    text = dict(
        TEXT, model_type="aria_text", moe_num_experts=2, moe_topk=1, moe_num_shared_experts=1
    )
    vision = dict(VIT, model_type="idefics3_vision", num_hidden_layers=1)
    config = transformers.AriaConfig(
        text_config=text, vision_config=vision, projector_patch_to_query_dict={16: 4}
    )
    return transformers.AriaForConditionalGeneration(config)


def ctrl() -> Any:
    """Its embedding is called `transformer.w`."""
    config = transformers.CTRLConfig(
        vocab_size=128, n_positions=64, n_embd=64, dff=128, n_layer=2, n_head=4
    )
    return transformers.CTRLLMHeadModel(config)


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=128, intermediate_size_mlp=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=128, num_local_experts=2, head_dim=16,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


def colpali() -> Any:
    """Its tower of text has a segment on disk that it has not in memory."""
    text = dict(TEXT, model_type="gemma", head_dim=16)
    vision = dict(VISION, model_type="siglip_vision_model", vision_use_head=False)
    vlm = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=100,
        hidden_size=64,
        projection_dim=64,
    )
    config = transformers.ColPaliConfig(vlm_config=vlm, text_config=text, embedding_dim=64)
    return transformers.ColPaliForRetrieval(config)


@pytest.mark.parametrize("scheme", ["int8", "float8", "bnb-nf4", "ct-fp8"])
def test_transformers_loads_colpali(scheme: str, tmp_path: Path) -> None:
    model = saved(colpali, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{scheme}")
    loaded, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    inputs = dict(TEXT_ONLY, attention_mask=torch.ones(1, 8, dtype=torch.long))
    with torch.no_grad():
        theirs, found = model(**inputs).embeddings.float(), loaded(**inputs).embeddings.float()
    assert torch.cosine_similarity(found.flatten(), theirs.flatten(), 0) > 0.9


def saved(make: Any, path: Path) -> Any:
    torch.manual_seed(0)
    model = make().bfloat16().eval()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("scheme", ["bnb-nf4", "bnb-int8", "int8", "float8", "ct-fp8"])
def test_transformers_loads_mask2former(scheme: str, tmp_path: Path) -> None:
    """Its backbone has a segment in memory that it has not on disk, and its decoder torch's MultiheadAttention."""
    model = saved(mask2former, tmp_path / "in")
    report = ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{scheme}")
    assert report.fidelity["quantize"] == 40
    assert any("knows no codes" in note for note in report.notes)
    loaded, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    for module in loaded.modules():
        # bitsandbytes 0.50 packs weights anew for AVX512_BF16, which fails for rows of half a block.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    image = torch.ones(1, 3, 64, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs, found = (
            m(pixel_values=image).masks_queries_logits.float() for m in (model, loaded)
        )
    assert torch.cosine_similarity(found.flatten(), theirs.flatten(), 0) > 0.9


PICTURE = dict(pixel_values=IMAGE["pixel_values"])
TEXT_ONLY = dict(input_ids=torch.arange(8)[None])


def alike(path: Path, model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """The model of this directory, every key of it used, its logits near to those of `model`."""
    loaded, said = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(said.values()), said
    with torch.no_grad():
        theirs, found = model(**inputs).logits.float(), loaded(**inputs).logits.float()
    assert torch.cosine_similarity(found.flatten(), theirs.flatten(), 0) > 0.9
    return loaded


@pytest.mark.parametrize(
    ("make", "inputs", "scheme"),
    [
        (llava, IMAGE, "bnb-nf4"), (llava, IMAGE, "bnb-int8"), (llava, IMAGE, "ct-int8"),
        (llava, IMAGE, "ct-fp8"), (t5, WORDS, "bnb-nf4"), (t5, WORDS, "bnb-int8"),
        (bart, WORDS, "int8"), (bart, WORDS, "float8"), (llava, IMAGE, "int8"),
        (llava, IMAGE, "float8"), (vit, PICTURE, "int8"), (vit, PICTURE, "float8"),
        (aria, TEXT_ONLY, "bnb-nf4"), (ctrl, TEXT_ONLY, "bnb-nf4"), (llama4, TEXT_ONLY, "int8"),
        (dinov2, PICTURE, "int8"), (qwen2_vl, TEXT_ONLY, "int8"), (qwen2_vl, TEXT_ONLY, "float8"),
    ],
)  # fmt: skip
def test_transformers_loads_and_runs_it(
    make: Any, inputs: dict[str, torch.Tensor], scheme: str, tmp_path: Path
) -> None:
    """The towers of Llava and Qwen2-VL and the layers of ViT and DINOv2 are called otherwise on disk
    than in memory, T5 holds `wo` in fp32, and BART has a buffer whose name has no dot."""
    model = saved(make, tmp_path / "in")
    left = ("vision_tower.*", "language_model.model.layers.0.*") if make is llava else ()
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{scheme}", no_encode=left)
    kept = ("vision_tower", "language_model.layers.0.") if left else (".wo.",)
    loaded = alike(tmp_path / "out", model, inputs)
    encodings = {tensor.encoding for tensor in ckptmap.open(tmp_path / "out").values()}
    assert encodings == {scheme, "dense"}
    for name, value in model.named_parameters():
        if any(part in name for part in kept):
            assert torch.equal(loaded.get_parameter(name).to(value.dtype), value), name


@pytest.mark.parametrize("scheme", ["bnb-nf4", "bnb-int8", "ct-int8"])
def test_experts_that_transformers_takes_apart_are_refused(scheme: str, tmp_path: Path) -> None:
    saved(llama4, tmp_path / "in")
    with refused(PlanError, "CKM203", match=r"transformers takes .*experts.gate_up_proj apart"):
        ckptmap.plan(tmp_path / "in", f"hf-{scheme}")


def test_what_is_held_in_fp32_is_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    saved(t5, tmp_path / "in")
    with refused(PlanError, "CKM203", match=r"DenseReluDense\.wo\.weight: cannot be bnb-nf4"):
        ckptmap.plan(tmp_path / "in", "hf-bnb-nf4", encode=("*.wo.weight",))


def test_groups_of_several_ways_name_modules_as_they_are_loaded(tmp_path: Path) -> None:
    """Of a model whose query projections are float8 and all other layers int8."""
    model, mid, out = saved(llava, tmp_path / "in"), tmp_path / "mid", tmp_path / "out"
    queries = ("*.q_proj.weight",)
    ckptmap.convert(tmp_path / "in", mid, to="hf-ct-fp8", encode=queries)
    ckptmap.convert(mid, out, to="hf-ct-int8", no_encode=queries)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision" and len(config["config_groups"]) == 2
    alike(out, model, IMAGE)


def test_what_is_loaded_by_another_name_opens_by_its_own(tmp_path: Path) -> None:
    """torchao's metadata names Llava's weights twice; each is there once, and moves on as bytes."""
    saved(llava, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-int8")
    ckptmap.convert(tmp_path / "out", tmp_path / "again", to="hf")
    with ckptmap.open(tmp_path / "in") as source, ckptmap.open(tmp_path / "out") as found:
        assert set(found) == set(source)
    same = ("model.safetensors", "config.json")
    assert all(
        (tmp_path / "again" / n).read_bytes() == (tmp_path / "out" / n).read_bytes() for n in same
    )


def test_a_model_whose_names_are_not_known_is_refused_where_they_matter(tmp_path: Path) -> None:
    config = transformers.SegformerConfig(
        hidden_sizes=[64] * 4, num_attention_heads=[1] * 4, depths=[1] * 4, decoder_hidden_size=64
    )
    saved(lambda: transformers.SegformerForImageClassification(config), tmp_path / "in")
    with refused(PlanError, "CKM203", match=r"cannot be int8 .* renames the weights of segformer"):
        ckptmap.plan(tmp_path / "in", "hf-int8")
    assert ckptmap.plan(tmp_path / "in", "full-int8") and ckptmap.plan(
        tmp_path / "in", "hf-bnb-int8"
    )


def test_every_model_type_that_transformers_renames_is_known_or_listed() -> None:
    """Of the installed release: a family that is new to it is met here, not by a user."""
    from transformers import conversion_mapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    conversion_mapping.get_checkpoint_conversion_mapping("llava")
    rules = conversion_mapping._checkpoint_conversion_mapping_cache
    renamed = {
        kind
        for kind, found in rules.items()
        if kind in CONFIG_MAPPING_NAMES
        and any("expert" not in f"{r.source_patterns}{r.target_patterns}" for r in found)
    }
    assert len(renamed) > 100
    assert renamed - UNKNOWN == {kind for kind in KNOWN.split() if kind in CONFIG_MAPPING_NAMES}


def test_what_lies_beside_the_weights_is_there_again(tmp_path: Path) -> None:
    """Generation config, tokenizer, processor, chat templates and custom code, by transformers' own
    `save_pretrained` and `from_pretrained`."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<s>": 2}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", extra_special_tokens={"start": "<s>"}
    )
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "T{{ messages }}"}
    hears = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
    processor = transformers.Wav2Vec2Processor(feature_extractor=hears, tokenizer=tokenizer)
    config = transformers.LlamaConfig(**TEXT, auto_map={"AutoModel": "modeling_cut.Cut"})
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=7, do_sample=True, temperature=0.3, eos_token_id=[1, 2], pad_token_id=0
    )
    model.save_pretrained(tmp_path / "in")
    processor.save_pretrained(tmp_path / "in")
    hears.save_pretrained(tmp_path / "in")
    (tmp_path / "in/modeling_cut.py").write_text("import torch\n")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    ours = {"config.json", "model.safetensors", "ckptmap.manifest.json"}
    files = {file.relative_to(tmp_path / "in") for file in (tmp_path / "in").rglob("*.*")}
    assert len(files) > 8 and Path("additional_chat_templates/tool_use.jinja") in files
    for file in files:
        same = (tmp_path / "in" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
        assert same or file.name in ours, file
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    assert loaded.dtype == torch.bfloat16
    again = transformers.Wav2Vec2Processor.from_pretrained(tmp_path / "out")
    assert again.tokenizer.chat_template == tokenizer.chat_template
    assert again.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert again.feature_extractor.to_dict() == hears.to_dict()
    assert ckptmap.verify(tmp_path / "out").ok


def test_modules_behind_the_model_go_along(tmp_path: Path) -> None:
    """As sentence-transformers 6 saves them: without their folders its loader fails, without
    their configs it pools another way."""
    source = tmp_path / "in"
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=7, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64,
        )
    ).save_pretrained(source)  # fmt: skip
    modules = [{"idx": i, "path": path} for i, path in enumerate(("", "1_Pooling", "2_Dense"))]
    beside = {
        "modules.json": modules,
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
        "sentence_bert_config.json": {"max_seq_length": 16},
        "1_Pooling/config.json": {"pooling_mode": "cls"},
        "2_Dense/config.json": {"in_features": 32, "out_features": 4},
    }
    for name, content in beside.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(json.dumps(content))
    save_file({"linear.weight": torch.ones(4, 32)}, source / "2_Dense" / "model.safetensors")
    report = ckptmap.convert(source, tmp_path / "out", to="hf-bf16")
    assert "copied unchanged: 2_Dense/model.safetensors" in report.notes
    behind = "left behind: 2_Dense/model.safetensors"
    assert behind not in report.notes
    assert behind in ckptmap.plan(source, "full").notes
    for name in (*beside, "2_Dense/model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    assert ckptmap.verify(tmp_path / "out").ok
    (source / "modules.json").write_text('[{"path": "../other"}]')
    with pytest.raises(SourceError, match=r"'\.\./other' leads out of the directory"):
        ckptmap.plan(source, "hf")


def test_scripts_that_no_config_names_stay_behind(tmp_path: Path) -> None:
    """They are the user's own: what is converted may be pushed."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(tmp_path / "in")
    (tmp_path / "in/train.py").write_text("TOKEN = 'secret'\n")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize("limit", ["1KB", "1GB"])
def test_names_that_diffusers_looks_for(tmp_path: Path, limit: str) -> None:
    """Its `save_pretrained`, by the function that it calls; under `model*` it finds no weights."""
    source, out = tmp_path / "in", tmp_path / "out"
    state = {f"conv.{i}.weight": torch.randn(8, 8, 3) for i in range(4)}
    source.mkdir()
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict(state, source, filename_pattern=pattern, max_shard_size=limit)
    config = {"_class_name": "AutoencoderKL", "_diffusers_version": "0.42.1"}
    (source / "config.json").write_text(json.dumps(config))
    nbytes = 1_000 if limit == "1KB" else 10**9
    ckptmap.convert(source, out, to="hf", max_shard_nbytes=nbytes)
    weights = {file.name for file in source.iterdir()}
    assert weights < {file.name for file in out.iterdir()} and len(weights) in (2, 6)
    assert ckptmap.verify(out).ok and ckptmap.diff(source, out, values=True).equal
    torch.save(state, tmp_path / "m.pt")
    given = source / "config.json"
    again = {"config_from": given, "max_shard_nbytes": nbytes, "overwrite": True}
    ckptmap.convert(tmp_path / "m.pt", out, to="hf", **again)
    assert weights < {file.name for file in out.iterdir()}
