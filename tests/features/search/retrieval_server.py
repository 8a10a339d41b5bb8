"""A server of Search-R1's protocol whose answers a test chooses."""

from agent_r1_trl.testing import local_server


def queries_of(seen):
    return [query for body in seen.bodies for query in body.get("queries", [body.get("query")])]


def documents(query, k=2):
    return [{"id": f"{query}-{n}", "contents": f'"Title {n}"\nText about {query}.'} for n in range(k)]


def scored(query, k=2):
    return [{"document": document, "score": 1.0 / (n + 1)} for n, document in enumerate(documents(query, k))]


def usual(body, number):
    return 200, {"result": [scored(query, body["topk"]) for query in body["queries"]]}


def serving(respond=usual, delay_s=0.0):
    """(URL, what the server has seen)."""
    return local_server(respond, delay_s)
