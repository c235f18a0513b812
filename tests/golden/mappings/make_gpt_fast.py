"""Writes `gpt-fast.tsv` with the conversion scripts of gpt-fast.

    python -m tests.golden.mappings.make_gpt_fast CODE

CODE is a clone of pytorch-labs/gpt-fast (32971d3 of 2024-09-15). Its script for Mixtral reads what
Mistral AI publishes, not what transformers writes. That form has no converter of its own that
still runs, so it is written here after what the script documents: Meta's names, and the experts of
a layer in one matrix, `block_sparse_moe.w1 [(experts ffn), hidden]`, `w2` transposed likewise. It
becomes `mixtral/meta.tsv`.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.mapping_configs import iota

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]


def converted(script: Path, arguments: dict[str, Any], folder: str) -> State:
    """What one script of gpt-fast makes of the checkpoint in `folder`."""
    import torch

    for name in ("model", "convert_hf_checkpoint"):
        sys.modules.pop(name, None)
    sys.path[:0] = [str(script.parent.parent), str(script.parent)]
    model = importlib.import_module("model")
    model.transformer_configs["tiny-test"] = arguments
    module = importlib.import_module("convert_hf_checkpoint")
    module.convert_hf_checkpoint(checkpoint_dir=Path(folder), model_name="tiny-test")
    state: State = torch.load(Path(folder, "model.pth"), weights_only=True)
    return state


def dense(code: Path, disk: State, arguments: dict[str, Any]) -> State:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(disk, Path(folder, "model.safetensors"))
        index = {"weight_map": dict.fromkeys(disk, "model.safetensors")}
        Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
        return converted(code / "scripts/convert_hf_checkpoint.py", arguments, folder)


def published_mixtral(disk: State, heads: int, kv_heads: int, experts: int) -> State:
    """Mistral AI's own form of a Mixtral state dict."""
    import torch

    def rope(tensor: Tensor, count: int) -> Tensor:
        head = tensor.shape[0] // count
        halves = tensor.view(count, 2, head // 2, tensor.shape[1])
        return halves.transpose(1, 2).reshape(tensor.shape)

    plain = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.v_proj.weight": "attention.wv.weight",
        "self_attn.o_proj.weight": "attention.wo.weight",
        "block_sparse_moe.gate.weight": "block_sparse_moe.gate.weight",
    }
    state = {
        "tok_embeddings.weight": disk["model.embed_tokens.weight"],
        "norm.weight": disk["model.norm.weight"],
        "output.weight": disk["lm_head.weight"],
    }
    for n in (0, 1):
        source, target = f"model.layers.{n}.", f"layers.{n}."
        state |= {target + new: disk[source + old] for old, new in plain.items()}
        query, key = (disk[f"{source}self_attn.{name}_proj.weight"] for name in "qk")
        state[target + "attention.wq.weight"] = rope(query, heads)
        state[target + "attention.wk.weight"] = rope(key, kv_heads)
        for name in ("w1", "w2", "w3"):
            each = [
                disk[f"{source}block_sparse_moe.experts.{e}.{name}.weight"] for e in range(experts)
            ]
            each = [tensor.T for tensor in each] if name == "w2" else each
            state[f"{target}block_sparse_moe.{name}"] = torch.cat(each).contiguous()
    return state


def main() -> None:
    import torch

    code = Path(sys.argv[1])
    for name in ("llama", "mistral_square", "mixtral"):
        config = json.loads((ROOT / name / "config.json").read_text())
        shapes = {key: row.shape for key, row in read(ROOT / name / "hf.tsv").items()}
        disk = dict(iota(shapes))
        arguments = {
            "n_layer": config["num_hidden_layers"],
            "n_head": config["num_attention_heads"],
            "n_local_heads": config["num_key_value_heads"],
            "dim": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "vocab_size": config["vocab_size"],
        }
        script = "scripts/convert_hf_checkpoint.py"
        if name == "mixtral":
            script = "mixtral-moe/" + script
            arguments["num_experts"] = config["num_local_experts"]
            heads = (arguments["n_head"], arguments["n_local_heads"], arguments["num_experts"])
            published = published_mixtral(disk, *heads)
            made_by = ["the documented layout of Mistral AI's files, see make_gpt_fast.py"]
            write(ROOT / name / "meta.tsv", rows(published), made_by)
            with tempfile.TemporaryDirectory() as folder:
                torch.save(published, Path(folder, "consolidated.00.pt"))
                native = converted(code / script, arguments, folder)
        else:
            native = dense(code, disk, arguments)
        write(ROOT / name / "gpt-fast.tsv", rows(native), [f"gpt-fast 32971d3: {script}"])


if __name__ == "__main__":
    main()
