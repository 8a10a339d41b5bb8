"""Short training runs under random faults: none may hang, lose anything in silence, or train on what was not sampled.

    make soak RUNS=20
    make soak SEED=17 RUNS=1      # the run of seed 17 again

`plan.py` draws a run from its seed, `agent.py` is the run, `check.py` looks at what it left behind.
"""
