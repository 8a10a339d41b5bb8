"""From scored trajectories to a loss: batches, layouts of micro-batches, packing, importance ratios, losses.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> [batch] -> advantages -> [loss] -> step -> sync weights -> next rollout
"""
