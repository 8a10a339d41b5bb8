"""An agent of the user's own, which talks to the policy through an OpenAI-compatible endpoint on this machine.

    env.py       the environment: it starts the agent (a command line, too), awaits it, and scores what it returned
    server.py    the endpoint: one server for each event loop, keys, errors, streams
    wire.py      what a request asks for, and what an answer looks like
    session.py   the calls of one trajectory: budgets, retries, what is recorded and when
    held.py      which ids a request goes on from: a message is known by what it says

The server, the sessions and the generator live on the rollout's event loop; only plain functions have threads.
What was sampled is never rendered: the ids that are held are the beginning of the next prompt.
"""

from agent_r1_trl.features.doors.agent.env import AgentEnv, Door

__all__ = ["AgentEnv", "Door"]
