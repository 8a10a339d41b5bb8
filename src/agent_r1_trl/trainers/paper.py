"""The paper of both trainers."""

AGENT_R1 = {
    "title": "Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning",
    "id": "2511.14460",
    "citation": """\
@misc{cheng2025agentr1,
  title         = {{Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning}},
  author        = {Cheng, Mingyue and Ouyang, Jie and Yu, Shuo and Yan, Ruiran and Luo, Yucong and Liu, Zirui and
                   Wang, Daoyu and Liu, Qi and Chen, Enhong},
  year          = {2025},
  eprint        = {2511.14460},
  archivePrefix = {arXiv},
}""",
}
"""The paper of both trainers, as TRL's `_paper`."""
