"""Publishing to the Hugging Face Hub, and fetching from it as it is."""
