"""The echo trap: signals of a collapsing run, and the judgement on them. Pure functions; nothing here needs torch.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from agent_r1_trl.echo_trap.judgement import KEYS, EchoTrapJudge, judge
from agent_r1_trl.echo_trap.mutual_information import mutual_information
from agent_r1_trl.echo_trap.rollout import group_keys, rollout_signals, signal_record
from agent_r1_trl.echo_trap.verdict import STATES, Signal, Thresholds, Verdict

__all__ = [
    "KEYS",
    "STATES",
    "EchoTrapJudge",
    "Signal",
    "Thresholds",
    "Verdict",
    "group_keys",
    "judge",
    "mutual_information",
    "rollout_signals",
    "signal_record",
]
