"""One hook on the policy's input embeddings, however often gradient checkpointing is switched off and on again.

transformers registers a hook each time that checkpointing is enabled, for embeddings whose output needs gradients, and
forgets the one before it. TRL switches it off around each rollout and each scoring pass, so a long run would call
thousands of them for every token that it samples.
"""

from __future__ import annotations

import types

from transformers import PreTrainedModel


def keep_one_input_hook(base: PreTrainedModel) -> None:
    """Have a causal LM take its hooks off before it registers others."""
    base.enable_input_require_grads = types.MethodType(_enable_input_require_grads, base)  # type: ignore[method-assign]


def _enable_input_require_grads(self: PreTrainedModel) -> None:
    for handle in getattr(self, "_require_grads_hooks", ()):
        handle.remove()
    type(self).enable_input_require_grads(self)
