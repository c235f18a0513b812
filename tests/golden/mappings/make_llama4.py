"""Writes `hf-modules.tsv` of both kinds of Llama 4: the state dict of a model with a module an expert, by transformers' code.

    python -m tests.golden.mappings.make_llama4

transformers puts `SequentialLlama4TextExperts` in the place of the stacked experts for some quantizers. Here it takes
their weights, and must compute what they do. Written with transformers 5.23.0.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.golden.mappings.make_hf import disk_state
from tests.golden.mappings.tables import ROOT, rows, write
from tests.support.mapping_configs import TINY

NAMES = ("llama4_text", "llama4")


def with_modules(model: Any, *, compared: bool) -> Any:
    """Replace the experts of each layer by modules of equal weights, as transformers' quantizers do."""
    from transformers.quantizers.base import SequentialLlama4TextExperts

    text = model.config.get_text_config()
    for layer in getattr(model, "language_model", model).model.layers:
        stacked = getattr(layer.feed_forward, "experts", None)
        if stacked is None:
            continue
        made = SequentialLlama4TextExperts(text)
        for number, expert in enumerate(made):
            gate, up = stacked.gate_up_proj[number].chunk(2, dim=1)
            weights = {"gate_proj": gate, "up_proj": up, "down_proj": stacked.down_proj[number]}
            for name, weight in weights.items():
                getattr(expert, name).weight.data = weight.detach().t().contiguous()
        if compared:
            inputs = torch.randn(stacked.num_experts, text.hidden_size)
            torch.testing.assert_close(made(inputs).flatten(0, 1), stacked(inputs))
        layer.feed_forward.experts = made
    return model


def main() -> None:
    import transformers

    made_by = [
        f"transformers {transformers.__version__}: SequentialLlama4TextExperts, then state_dict()"
    ]
    for name in NAMES:
        with_modules(
            TINY[name].build(), compared=True
        )  # a golden's numbers are too large to multiply
        model = TINY[name].build()
        model.load_state_dict(disk_state(TINY[name])[0])
        state = with_modules(model, compared=False).state_dict()
        write(ROOT / name / "hf-modules.tsv", rows(state), made_by)


if __name__ == "__main__":
    main()
