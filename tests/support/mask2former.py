"""A small Mask2Former over Swin. Its loss, which needs scipy, is replaced for the process that imports this."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig
from transformers.models.mask2former import modeling_mask2former


class NoLoss(nn.Module):
    """Stands for `Mask2FormerLoss`, which has no weights, and one buffer."""

    def __init__(self, config: Mask2FormerConfig, **more: object) -> None:
        super().__init__()
        self.num_labels, self.eos_coef = config.num_labels, 0.1
        self.register_buffer("empty_weight", torch.ones(config.num_labels + 1))


modeling_mask2former.Mask2FormerLoss = NoLoss


def mask2former() -> Mask2FormerForUniversalSegmentation:
    backbone = SwinConfig(
        image_size=64, embed_dim=32, depths=[1] * 4, num_heads=[2] * 4, window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=64, mask_feature_size=64, hidden_dim=64,
        encoder_feedforward_dim=64, encoder_layers=1, decoder_layers=2, num_attention_heads=4,
        dim_feedforward=64, num_queries=5,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)
