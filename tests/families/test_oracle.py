"""Every family of transformers is trained as it was sampled, in every layout that accepts it, or refused by name."""

import re

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.configurations import FAMILIES, MEANINGLESS, refusal
from tests.families.oracle import LAYOUTS, RefusedError, measure

IN_THE_SUITE = {
    "qwen3": "norms behind the projections of queries and keys",
    "gpt2": "learned positions",
    "falcon_alibi": "ALiBi",
    "phi3_longrope": "factors that depend on the longest row",
    "llama_dynamic": "frequencies that depend on the longest row",
    "ministral3": "queries scaled by position",
    "llama4_untuned": "attention in chunks, and a backbone that the class does not name",
    "gemma3": "windows in every other layer, each kind with a rotation of its own",
    "gpt_oss": "attention sinks, windows and experts",
    "mixtral_router_logits": "experts whose logits are returned",
    "qwen3_5": "recurrent state",
    "stablelm": "an attention that keeps the layout of packed rows from its function",
}
"""One for each kind of function; `make nightly` runs all families."""
_OF_THE_SUITE = [(family, layout) for family in IN_THE_SUITE for layout in ("padded", "shared")]
_OF_THE_NIGHT = [
    (family, layout) for family in FAMILIES for layout in LAYOUTS if (family, layout) not in _OF_THE_SUITE
]


def check(family, layout):
    reason = refusal(family, layout)
    if reason is None:
        measures = measure(family, layout)
        assert measures.is_exact, measures
        assert measures.longest > 60, "the rows must cross windows, chunks and switches"
        return
    with pytest.raises(RefusedError) as caught:
        measure(family, layout)
    assert reason in str(caught.value)
    assert re.search(r"Set |Load |Pass |[Tt]ake another", str(caught.value)), caught.value


@pytest.mark.parametrize(("family", "layout"), _OF_THE_SUITE)
def test_a_family_is_trained_as_it_was_sampled(family, layout):
    check(family, layout)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "layout"), _OF_THE_NIGHT)
def test_every_family_is_trained_as_it_was_sampled(family, layout):
    check(family, layout)


def test_every_causal_lm_of_transformers_has_an_entry_or_a_reason_for_having_none():
    configured = {model_type for model_type, _ in FAMILIES.values()}
    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - configured - {*MEANINGLESS} == set()
    assert configured & {*MEANINGLESS} == set()
