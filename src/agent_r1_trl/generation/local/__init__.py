"""Generation with a transformers model in this process."""
