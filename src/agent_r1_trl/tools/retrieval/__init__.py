"""What the search tool searches: a local index, or a server elsewhere.

retriever = open_retriever("http://10.0.0.7:8010")     # or "corpus.jsonl", or a folder
retriever.search("capital of Norway", k=5)             # list[Passage], best first
"""

from agent_r1_trl.tools.retrieval.folder import build_index, open_index
from agent_r1_trl.tools.retrieval.http import HttpRetriever
from agent_r1_trl.tools.retrieval.opening import Retriever, RetrieverSource, open_retriever

__all__ = ["HttpRetriever", "Retriever", "RetrieverSource", "build_index", "open_index", "open_retriever"]
