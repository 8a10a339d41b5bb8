"""What the search tool searches besides a local corpus: a server elsewhere, or an index that was built ahead.

retriever = open_retriever("http://10.0.0.7:8010")     # or "corpus.jsonl", or a folder
retriever.search("capital of Norway", k=5)             # list[Passage], best first
"""

from agent_r1_trl.features.search.http import HttpRetriever
from agent_r1_trl.features.search.opening import build_index, open_index

__all__ = ["HttpRetriever", "build_index", "open_index"]
