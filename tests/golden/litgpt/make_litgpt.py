"""Write `model.pth` as `litgpt convert_from_litgpt` does, with litgpt 0.5.13: python make_litgpt.py

Its `incremental_save` writes storages before the pickle, and numbers them with integers where torch.save has text.
"""

from pathlib import Path

import torch
from litgpt.utils import incremental_save

HERE = Path(__file__).parent

if __name__ == "__main__":
    shared = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    with incremental_save(HERE / "model.pth") as saver:
        early = saver.store_early(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
        saver.save({"head.weight": early, "a": shared, "b": shared[1], "c": shared.t()})
