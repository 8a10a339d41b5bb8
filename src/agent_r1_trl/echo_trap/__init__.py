"""The echo trap: signals of a collapsing run, and the judgement on them. Pure functions; nothing here needs torch.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from agent_r1_trl.echo_trap.judgement import KEYS, EchoTrapJudge, judge
from agent_r1_trl.echo_trap.verdict import STATES, Signal, Thresholds, Verdict

__all__ = ["KEYS", "STATES", "EchoTrapJudge", "Signal", "Thresholds", "Verdict", "judge"]
