"""Microscaling formats: codes of 4 or 8 bits floating point, each block with a scale of 8 bits.

The element and scale types are those of the OCP Microscaling Formats (MX) specification 1.0; NVFP4 has
float8 scales for blocks of 16, and a scale of the whole tensor.
"""
