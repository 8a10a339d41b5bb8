"""The critic: state values out of the same wrapped forward that DDP and ZeRO see.

Three shapes, one interface:

- `adapter`: a second adapter on the policy's own base model, with a value head. For runs with an adapter.
- `head`: a value head on the policy's hidden states. No second pass.
- `model`: a backbone of its own (a submodule of the policy, so that every wrapper sees it).

`attach_critic` wraps the base model's forward once more: with `compute_values=True` (or `values_only=True`) one
outer forward holds policy and critic, so that one loss and one backward are all that DDP or DeepSpeed see. Two outer
forwards fail under DDP, two backwards are silently wrong under ZeRO-3.

Covered here: attaching, value forward, adapter switching, checkpointing, saving. Not covered: losses and schedules.
"""

from agent_r1_trl.critic.adapter import (
    CRITIC_ADAPTER,
    base_causal_lm,
    critic_parameters,
    enable_critic_gradients,
    is_critic_name,
    set_detached,
    use_critic_adapter,
)
from agent_r1_trl.critic.attach import CRITIC_FILE, CRITIC_KINDS, ValueHead, attach_critic, load_critic, save_critic

__all__ = [
    "CRITIC_ADAPTER",
    "CRITIC_FILE",
    "CRITIC_KINDS",
    "ValueHead",
    "attach_critic",
    "base_causal_lm",
    "critic_parameters",
    "enable_critic_gradients",
    "is_critic_name",
    "load_critic",
    "save_critic",
    "set_detached",
    "use_critic_adapter",
]
