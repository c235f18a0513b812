"""Checkpoints on the Hugging Face Hub, read where they are: headers by range, files when needed."""
