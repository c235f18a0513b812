"""Writes `meta-llama2` and `meta-llama3` with Meta's own model on fairscale's own layers.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.golden.parallel.make_meta \
        FAIRSCALE LLAMA_MODELS [FOLDER]

FAIRSCALE is a folder with the package of fairscale 0.4.13, LLAMA_MODELS one with llama-models
0.3.0. Its Transformer is built on the ranks of gloo, and fairscale's own function scatters each
weight of the iota-filled `llama`: what each rank's state dict then holds is its table. Llama 2 had
the same model, but its embedding was fairscale's ParallelEmbedding. Before that a random model of
transformers, renamed and scattered alike, is run: its logits are compared with transformers'.
FOLDER gets the files that Meta would have published of the random model.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.golden.mappings.tables import rows, write
from tests.support.mapping_configs import TINY
from tests.support.mapping_state import State, config_of, state_of

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).parent
PARAMS = {
    "dim": 120,
    "n_layers": 2,
    "n_heads": 12,
    "n_kv_heads": 4,
    "vocab_size": 102,
    "multiple_of": 56,
    "ffn_dim_multiplier": 0.1,
    "norm_eps": 1e-06,
    "rope_theta": 10000.0,
}


def built(embedding: str) -> Any:
    """Meta's Transformer, with an embedding class of fairscale's."""
    args = import_module("llama_models.llama3.args")
    module = import_module("llama_models.llama3.model")
    layers = import_module("fairscale.nn.model_parallel.layers")
    vars(module)["VocabParallelEmbedding"] = getattr(layers, embedding)
    return module.Transformer(args.ModelArgs(**PARAMS, max_batch_size=2, max_seq_len=32))


def scatter(model: nn.Module, whole: State) -> None:
    """Each rank's parts of a whole state dict, by fairscale's own function."""
    import torch

    layers = import_module("fairscale.nn.model_parallel.layers")
    for name, module in model.named_modules():
        value = whole.get(f"{name}.weight")
        if value is None:
            continue
        if not type(module).__module__.startswith("fairscale"):
            module.weight.data.copy_(value)
            continue
        own = tuple(module.weight.shape)
        dim = next((d for d in (0, 1) if own[d] != value.shape[d]), 0)

        def fill(master: torch.Tensor, value: torch.Tensor = value) -> None:
            master.copy_(value)

        layers._initialize_affine_weight(module.weight, *value.shape, own[dim], dim, fill)


def check_logits(model: Any, folder: Path | None) -> None:
    """A random model of transformers, converted and scattered, has the same logits."""
    import torch
    import torch.distributed as dist

    from ckptmap.mapping.translate_state_dict import translate_names

    source = TINY["llama"].build()
    with torch.no_grad():
        for tensor in source.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    scatter(model, translate_names(source.state_dict(), "meta", config_of("llama")))
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        theirs = source(tokens).logits
    torch.testing.assert_close(model(tokens, 0), theirs, rtol=1e-3, atol=1e-4)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder / f"consolidated.{dist.get_rank():02d}.pth")
        torch.save(theirs, folder / "logits.pt")
        (folder / "params.json").write_text(json.dumps(PARAMS))


def main() -> None:
    import torch.distributed as dist

    sys.path[:0] = sys.argv[1:3]
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    dist.init_process_group("gloo")
    import_module("fairscale.nn.model_parallel.initialize").initialize_model_parallel(2)
    for name, embedding in (
        ("llama3", "VocabParallelEmbedding"),
        ("llama2", "ParallelEmbedding"),
    ):
        model = built(embedding)
        check_logits(model, folder and folder / name)
        scatter(model, state_of("llama", "meta"))
        made_by = [f"fairscale 0.4.13 ({embedding}) and llama-models 0.3.0, logits equal"]
        table = rows(dict(model.state_dict()))
        write(ROOT / f"meta-{name}" / f"rank{dist.get_rank()}.tsv", table, made_by)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
