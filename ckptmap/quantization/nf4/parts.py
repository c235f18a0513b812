"""The names of the five stored parts of an NF4 weight; `encoding` says what each holds."""

from __future__ import annotations

DATA, SCALERS, FACTOR = "quantized_data", "quantized_scalers", "quantization_factor"
MEAN, TABLE = "scaler_mean", "nf4"
PARTS = (DATA, SCALERS, FACTOR, MEAN, TABLE)
