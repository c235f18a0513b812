"""Quantization with one scale per block of elements: geometry, arithmetic, encoders, records.

    w [a, b] T  ->  codes [a, b] i8 or fp8, scale [ceil(a/p), ceil(b/q)]      blocks of p x q elements

The formats of the neighbouring packages (torchao, compressed-tensors, DeepSeek fp8, bitsandbytes, NF4)
build on these modules and do not import each other.
"""
