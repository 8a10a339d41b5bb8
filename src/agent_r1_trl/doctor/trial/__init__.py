"""Two real steps of a recipe, measured: what `agent-r1-trl doctor --run` judges.

`Meter` measures a trainer while it trains, `time_variants` times its update in other layouts and with other attention
kernels, and `judge` makes findings of both.
"""

from agent_r1_trl.doctor.trial.meter import Meter, Trial, of_all_processes
from agent_r1_trl.doctor.trial.variants import Variant, attention_kernels, time_variants
from agent_r1_trl.doctor.trial.verdict import judge, report_failure

__all__ = [
    "Meter",
    "Trial",
    "Variant",
    "attention_kernels",
    "judge",
    "of_all_processes",
    "report_failure",
    "time_variants",
]
