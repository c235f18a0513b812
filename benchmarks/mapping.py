"""Measure the cost of renaming: rules over 100,000 keys, and RoPE's permutation against a copy.

    python benchmarks/mapping.py                  # 8B shapes, 4 layers: a source of 2.3 GB
    python benchmarks/mapping.py --layers 1 --rounds 1

The targets: 100,000 keys are planned in less than a second without torch; a conversion to Meta's
names, which permutes the rows of every q and k, takes at most twice the time of one without
renaming.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measure import run

KEYS = 11_111
"""Layers of nine tensors each: with three more tensors, 100,002 keys."""
HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 4096, 32, 8, 128, 14336, 32064

PLANNED = """
import gc, sys, time
gc.disable()
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.mapping.detect import choose
from ckptmap.tensors import TensorInfo
config = dict(model_type="llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, intermediate_size=128, vocab_size=100, num_hidden_layers={layers})
shapes = dict({shapes!r})
infos = {{"model.embed_tokens.weight": TensorInfo((100, 64), "bfloat16"),
         "lm_head.weight": TensorInfo((100, 64), "bfloat16"),
         "model.norm.weight": TensorInfo((64,), "bfloat16")}}
for n in range({layers}):
    for name, shape in shapes.items():
        infos[f"model.layers.{{n}}.{{name}}.weight"] = TensorInfo(tuple(shape), "bfloat16")
wall, cpu = time.perf_counter(), time.process_time()
choice = choose(list(infos), {scheme!r}, None, config)
targets = translate(infos, choice.source, choice.target, config).targets
print(len(infos), len(targets), time.perf_counter() - wall, time.process_time() - cpu,
      "torch" in sys.modules)
"""


def shapes(hidden: int, heads: int, kv: int, head: int, ffn: int) -> dict[str, list[int]]:
    """Return the shapes of one layer of Llama, [out, in]."""
    return {
        "input_layernorm": [hidden],
        "self_attn.q_proj": [heads * head, hidden],
        "self_attn.k_proj": [kv * head, hidden],
        "self_attn.v_proj": [kv * head, hidden],
        "self_attn.o_proj": [hidden, heads * head],
        "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn],
        "post_attention_layernorm": [hidden],
    }


def keys(rounds: int) -> None:
    """Print the seconds to choose a naming scheme and to map all keys to their new names."""
    for scheme in ("torchtune", "meta", "llama/gpt-fast"):
        program = PLANNED.format(
            layers=KEYS, shapes=list(shapes(64, 4, 2, 16, 128).items()), scheme=scheme
        )
        found = []
        for _ in range(rounds):
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True
            )
            found.append(done.stdout.split())
        cpu = statistics.median(float(row[3]) for row in found)
        wall = statistics.median(float(row[2]) for row in found)
        count, made, torch = found[0][0], found[0][1], found[0][4]
        print(
            f"{count} keys -> {scheme} ({made} tensors): {cpu:.2f} s CPU, {wall:.2f} s wall,"
            f" torch imported: {torch}"
        )


def source(folder: Path, layers: int) -> None:
    """Write a safetensors file with the shapes of an 8B model, and its config."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    weights = {"model.norm.weight": torch.randn(HIDDEN).bfloat16()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)
    for layer in range(layers):
        for name, shape in shapes(HIDDEN, HEADS, KV_HEADS, HEAD, FFN).items():
            key = f"model.layers.{layer}.{name}.weight"
            weights[key] = torch.randn(shape, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "intermediate_size": FFN,
        "vocab_size": VOCAB, "num_hidden_layers": layers, "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def rope(work: Path, layers: int, rounds: int) -> None:
    """Measure the same conversion with and without renaming, in turn; print the ratios."""
    folder = work / f"llama8b-{layers}"
    if not (folder / "config.json").is_file():
        source(folder, layers)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    plain = [
        sys.executable,
        "-m",
        "ckptmap",
        "convert",
        str(folder),
        "out.pt",
        "--quiet",
        "--to",
        "full",
    ]
    ratios = []
    for number in range(rounds + 1):
        samples = []
        for argv in (plain, [*plain, "--names", "meta"]):
            (work / "out.pt").unlink(missing_ok=True)
            os.sync()
            samples.append(run(argv, work, env))
        if number:  # the first is a warm-up
            ratios.append(
                (samples[1].wall_s / samples[0].wall_s, samples[1].cpu_s / samples[0].cpu_s)
            )
            for title, sample in zip(("bytes", "--names meta"), samples, strict=True):
                peak = sample.anon_nbytes / 2**20
                print(
                    f"{title:14} {sample.wall_s:6.2f} s wall, {sample.cpu_s:5.2f} s CPU, {peak:.0f} MiB"
                )
    wall, cpu = (statistics.median(row[i] for row in ratios) for i in range(2))
    nbytes = (folder / "model.safetensors").stat().st_size
    print(
        f"RoPE permuted, {nbytes / 1e9:.2f} GB: {wall:.2f}x the wall, {cpu:.2f}x the CPU of the copy"
    )
    (work / "out.pt").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--keep", action="store_true", help="leave the source behind")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    keys(asked.rounds)
    rope(asked.work.absolute(), asked.layers, asked.rounds)
    if not asked.keep:
        shutil.rmtree(asked.work / f"llama8b-{asked.layers}", ignore_errors=True)
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
