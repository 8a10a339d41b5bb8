"""Search on a server elsewhere, beside a local corpus.

retriever = open_retriever("http://10.0.0.7:8010")
retriever.search("capital of Norway", k=5)             # list[Passage], best first
"""

from agent_r1_trl.features.search.http import HttpRetriever

__all__ = ["HttpRetriever"]
