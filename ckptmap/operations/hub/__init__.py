"""Publish checkpoints on the Hugging Face Hub, and fetch them from it unchanged."""
