"""Writes `megatron-MODEL` with Megatron core's own model on 2 tensor-parallel ranks and 2 stages.

    python -m torch.distributed.run --nproc-per-node 4 -m tests.golden.parallel.make_megatron \
        CORE FOLDER

CORE is a folder with the package `megatron.core` (megatron-core 0.16.1). A random model of
transformers, renamed and cut by `tests.support.parallel_writers`, is loaded into GPTModel on 2
tensor-parallel ranks, strictly, and its logits are compared with transformers': that is the proof
of the cut. With 2 pipeline stages the model must have the keys and shapes that the tables get.
FOLDER gets `torch_dist` directories as `megatron.core.dist_checkpointing` saves the iota-filled
models; what torch reads in them is a table, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.golden.mappings.make_megatron import arguments
from tests.golden.mappings.tables import rows, write
from tests.support.mapping_configs import TINY
from tests.support.mapping_state import State, config_of, state_of
from tests.support.parallel_writers import Grid, megatron_rank

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parent
MODELS = ("llama", "llama_tied", "qwen2", "qwen3", "gpt2")
VOCABULARY = 128


def built(name: str, pipeline: int) -> Any:
    """Megatron core's model of local modules, this rank's part."""
    import torch

    state = import_module("megatron.core.parallel_state")
    state.destroy_model_parallel()
    state.initialize_model_parallel(2, pipeline)
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = config_of(name)
    made = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        **arguments(config),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
    )
    learned = config["model_type"] == "gpt2"
    return (
        import_module("megatron.core.models.gpt.gpt_model")
        .GPTModel(
            made,
            specs.get_gpt_layer_local_spec(
                normalization=made.normalization, qk_layernorm=made.qk_layernorm
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=state.is_pipeline_first_stage(),
            post_process=state.is_pipeline_last_stage(),
            parallel_output=False,
            position_embedding_type="learned_absolute" if learned else "rope",
            rotary_base=int(config.get("rope_parameters", {}).get("rope_theta", 10000)),
            share_embeddings_and_output_weights=config["tie_word_embeddings"],
        )
        .eval()
    )


def filled(model: Any, whole: State, grid: Grid, rank: int, stage: int) -> dict[str, torch.Tensor]:
    """Fills a rank's model; it must have these tensors and no others."""
    held = megatron_rank(whole, grid, rank, stage, local=True)
    own = {key: value for key, value in model.state_dict().items() if value is not None}
    assert own.keys() == held.keys(), sorted(own.keys() ^ held.keys())
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in held.items()}
    model.load_state_dict(held, strict=False)
    return held


def check_logits(name: str) -> None:
    """On 2 tensor-parallel ranks, twice."""
    import torch
    import torch.distributed as dist

    from ckptmap.mapping.translate_state_dict import translate_names

    source = TINY[name].build()
    with torch.no_grad():
        for tensor in source.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    disk = {key: value for key, value in source.state_dict().items() if ".attn.bias" not in key}
    whole = translate_names(disk, "megatron", config_of(name))
    model = built(name, pipeline=1)
    layers = config_of(name).get("num_hidden_layers") or config_of(name)["n_layer"]
    filled(model, whole, Grid(2, (layers,)), dist.get_rank() % 2, 0)
    tokens = torch.arange(24).reshape(2, 12)
    future = torch.triu(torch.ones(12, 12), 1).bool()[None, None]
    with torch.no_grad():
        theirs = model(tokens, torch.arange(12).expand(2, 12), future)[..., :102]
        torch.testing.assert_close(theirs, source(tokens).logits, rtol=1e-3, atol=1e-4)


def tabled(name: str, folder: Path) -> None:
    """The tables of 2 tensor-parallel ranks and 2 stages."""
    import torch.distributed as dist

    rank, stage = dist.get_rank() % 2, dist.get_rank() // 2
    model = built(name, pipeline=2)
    held = filled(model, state_of(name, "megatron"), Grid(2, (1, 1)), rank, stage)
    made_by = ["megatron-core 0.16.1, logits equal to transformers'"]
    at = ROOT / f"megatron-{name}" / f"rank{rank}stage{stage}.tsv"
    write(at, rows(held), made_by)
    saved = folder / name
    if dist.get_rank() == 0:
        saved.mkdir(parents=True)
    dist.barrier()
    beside = {"iteration": 100, "checkpoint_version": 3.0}
    import_module("megatron.core.dist_checkpointing").save(
        {**model.sharded_state_dict(), **beside}, str(saved)
    )
    dist.barrier()
    if dist.get_rank() == 0:
        table = rows(saved_state(saved))
        write(ROOT / f"megatron-{name}" / "torch_dist.tsv", table, made_by)


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a DCP directory, by torch."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {key: entry.size for key, entry in entries.items() if hasattr(entry, "size")}
    state = {key: torch.empty(size) for key, size in sizes.items()}
    load(state, checkpoint_id=folder, no_dist=True)
    return state


def main() -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, sys.argv[1])
    folder = Path(sys.argv[2])
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args: None
    torch.Tensor.cuda = lambda self, *args: self  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    tracker = import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda self, name="": contextlib.nullcontext()
    for name in MODELS:
        check_logits(name)
        tabled(name, folder)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
