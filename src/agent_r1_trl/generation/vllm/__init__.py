"""Generation with vLLM: an engine in this process, or servers."""
