"""Chat messages to token ids and back: sampled ids stay as they are, and each token has a known author.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.format import ChatFormat

__all__ = ["ChatFormat", "ChatFormatError"]
