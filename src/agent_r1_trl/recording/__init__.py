"""Recording: trajectories written to disk, read back, and shown on the terminal."""

from agent_r1_trl.recording.events import read_metrics, read_steps
from agent_r1_trl.recording.store import Record, TrajectoryStore, read_records, read_trajectories, trajectory_files
from agent_r1_trl.recording.terminal import render_trajectory, summary_table

__all__ = [
    "Record",
    "TrajectoryStore",
    "read_metrics",
    "read_records",
    "read_steps",
    "read_trajectories",
    "render_trajectory",
    "summary_table",
    "trajectory_files",
]
