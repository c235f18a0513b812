"""A plan is carried out: bytes are copied, compared and encoded, files are sealed."""
