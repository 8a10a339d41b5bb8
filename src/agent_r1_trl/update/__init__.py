"""From scored trajectories to a loss: padded batches, micro-batches, packing, importance ratios, losses."""
