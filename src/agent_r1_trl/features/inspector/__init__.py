"""The inspector: a run as one HTML file that shows every token, and why it was pushed up or down."""

from agent_r1_trl.features.inspector.live import LivePage
from agent_r1_trl.features.inspector.page import write_page

__all__ = ["LivePage", "write_page"]
