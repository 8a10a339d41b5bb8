"""Every setting that declares its rule is held to it, by its flag; and tables of settings that belong together."""

import copy
import json
import math
import pickle
from dataclasses import dataclass

import pytest
from transformers import HfArgumentParser

from agent_r1_trl.cli.arguments import CommandArguments, EvalArguments, TrainArguments
from agent_r1_trl.features import mappings
from agent_r1_trl.features.doctor.command_arguments import DoctorArguments, MemoryArguments
from agent_r1_trl.features.serve.command_arguments import ServeArguments
from agent_r1_trl.rollout import RolloutLimits
from agent_r1_trl.settings import (
    Clash,
    Count,
    CountOr,
    Expression,
    Need,
    Number,
    OneOf,
    SomeOf,
    Switch,
    Text,
    Texts,
    Whole,
    check_settings,
    find_clashes,
    find_unread,
    plain,
    rules_of,
    setting,
)
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}
NO_NUMBERS = ("many", True, math.nan, [3])


def refused_by(rule):
    """Values that a rule does not take, at its bounds and of other kinds."""
    if isinstance(rule, Whole):
        above = () if rule.maximum is None else (rule.maximum + 1,)
        return (*NO_NUMBERS, math.inf, rule.minimum - 1, rule.minimum + 0.5, *above)
    if isinstance(rule, CountOr):
        return (*NO_NUMBERS, 0, 1.5, f"{rule.word}matic")
    if isinstance(rule, Number):
        steps = {"minimum": -1e-6, "maximum": 1e-6, "above": 0.0, "below": 0.0}
        at_bounds = [bound + steps[name] for name, bound in rule.bounds.items()]
        return (*NO_NUMBERS, -math.inf, *at_bounds, *([] if rule.may_be_infinite else [math.inf]))
    if isinstance(rule, SomeOf):
        return ([], ["nothing"], rule.choices[0], [rule.choices[0]] * 2, [3])
    if isinstance(rule, Texts):
        return ([], [""], [3], "one", 3)
    return {OneOf: ("nothing", 3, ""), Switch: (1, 0, "yes", None), Text: ("", "  ", 3), Expression: ("(", "a*", 3)}[
        type(rule)
    ]


FIXED = {
    RolloutLimits: {},
    MultiTurnGRPOConfig: CPU,
    MultiTurnPPOConfig: CPU,
    TrainArguments: {"env": "e"},
    EvalArguments: {"env": "e", "model_name_or_path": ["m"], "eval_dataset_name": ["d"]},
    DoctorArguments: {},
    MemoryArguments: {},
    ServeArguments: {"model_name_or_path": "m"},
}
"""Class -> settings that it cannot be made without."""
RULES = {
    (kind, name): rule
    for kind in FIXED
    for name, rule in rules_of(kind).items()
    if not issubclass(kind, CommandArguments) or name not in rules_of(RolloutLimits)
}


@pytest.mark.parametrize(("kind", "name"), RULES, ids=lambda item: getattr(item, "__name__", item))
def test_what_a_setting_does_not_take_is_refused_by_its_flag(kind, name):
    rule, is_optional = RULES[kind, name]
    for value in (*refused_by(rule), *([] if is_optional else [None])):
        with pytest.raises(ValueError, match=rf"^{name}=.* must be .*\. Set {name}\b"):
            kind(**FIXED[kind] | {name: value})


GROUPS = mappings(MultiTurnPPOConfig)
KEYS = [(flag, key, *rule) for flag, kind in GROUPS.items() for key, rule in rules_of(kind).items()]


@pytest.mark.parametrize(("flag", "key", "rule", "is_optional"), KEYS, ids=str)
def test_what_a_key_of_a_mapping_does_not_take_is_refused_by_both_names(flag, key, rule, is_optional):
    for value in (*refused_by(rule), *([] if is_optional else [None])):
        if not (isinstance(rule, SomeOf | Texts) and isinstance(value, str)):  # one of a list may stand alone
            with pytest.raises(ValueError, match=rf"^{flag}\.{key}=.* must be .*\. Set {flag}\.{key}\b"):
                MultiTurnGRPOConfig(**CPU, **{flag: {key: value}})


def test_a_mapping_is_read_from_whatever_stands_for_it():
    read = GROUPS["echo"].read
    assert read("echo", None) is read("echo", False) is read("echo", "false") is None
    assert read("echo", True) == read("echo", "true") == read("echo", {}) == GROUPS["echo"]()
    found = read("echo", '{"patience": 5, "actions": "clip"}')
    assert (found.patience, found.actions) == (5, ["clip"]) and read("echo", found) == found
    assert plain(found) == {"patience": 5, "actions": ["clip"]}
    assert GROUPS["servers"].read("servers", {"urls": "http://a:1"}).urls == ["http://a:1"]
    assert GROUPS["sampling"].read("sampling", None) == GROUPS["sampling"]() and plain(GROUPS["sampling"]()) is None


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        (
            "echo",
            {"patiense": 5},
            "echo: 'patiense' is none of its keys. Did you mean 'patience'\\? Correct or remove it; the keys are",
        ),
        ("echo", {3: 5}, "echo: 3 is none of its keys"),
        ("echo", "patience", "echo='patience' must be True, False or a mapping of some of thresholds, "),
        ("sampling", True, "sampling=True must be a mapping of some of filter_groups, "),
        ("sampling", ["curriculum"], "sampling=\\['curriculum'\\] must be a mapping"),
    ],
)
def test_what_is_no_mapping_is_refused_with_its_keys(flag, value, said):
    with pytest.raises(ValueError, match=said):
        MultiTurnGRPOConfig(**CPU, **{flag: value})


def test_a_configuration_with_mappings_is_written_copied_and_pickled():
    config = MultiTurnGRPOConfig(**CPU, num_generations=2, echo=True, sampling={"filter_groups": "top_p"})
    written = json.loads(config.to_json_string())
    assert (written["echo"], written["sampling"], written["outages"]) == (True, {"filter_groups": "top_p"}, None)
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other.sampling.filter_groups == "top_p" and other.echo == config.echo


def test_what_one_configuration_changes_in_a_mapping_stays_with_it():
    one = MultiTurnGRPOConfig(**CPU, sampling={"curriculum": True})
    other = MultiTurnGRPOConfig(**CPU, sampling=one.sampling)
    other.sampling.curriculum = False
    assert one.sampling.curriculum


def test_a_keyword_that_is_none_is_answered_with_the_setting_that_is_meant():
    with pytest.raises(TypeError, match=r"no setting 'context.turns'\. Write it as context=\{'turns': 2\}\."):
        MultiTurnPPOConfig(**{"context.turns": 2})
    with pytest.raises(TypeError, match=r"MultiTurnPPOConfig has no setting 'lamb'\. Did you mean 'lam'\?"):
        MultiTurnPPOConfig(**CPU, lamb=0.9)
    with pytest.raises(TypeError, match=r"no setting 'echo_patience'\. Did you mean 'echo\.patience'\?.*echo={"):
        MultiTurnGRPOConfig(**CPU, echo_patience=5)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (Whole(0), (0, 7)), (Whole(5), (5, 6)), (Number(), (-1, 0.5)), (Number(minimum=0, maximum=1), (0, 0.5, 1)),
        (Number(above=0, below=1), (1e-9, 0.999)), (Number(above=0, may_be_infinite=True), (1, math.inf)),
        (OneOf("a", "b"), ("a", "b")), (SomeOf("a", "b"), (["a"], ["b", "a"])), (Switch(), (True, False)),
        (Whole(1, 9), (1, 9)), (Text(), ("a",)), (Texts(), (["a"], ["b", "b"])),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_takes_its_bounds_and_what_lies_within(rule, values):
    assert [value for value in values if not rule.accepts(value)] == []
    assert [value for value in refused_by(rule) if rule.accepts(value)] == []


@dataclass
class Oven:
    degrees: Count | None = setting(180, "How hot.")
    fan: bool = False
    minutes: Count = setting(30, "How long.")


def test_a_field_that_is_declared_again_keeps_its_rule():
    @dataclass
    class SmallOven(Oven):
        minutes: int = setting(5, "How long.")

    with pytest.raises(ValueError, match=r"^minutes=0"):
        check_settings(SmallOven(minutes=0))


def test_transformers_parser_reads_settings_like_other_fields():
    oven = HfArgumentParser(Oven).parse_args_into_dataclasses(["--degrees", "200"])[0]
    assert oven == Oven(degrees=200)
    check_settings(Oven(degrees=None))
    with pytest.raises(ValueError, match=r"^minutes=None must be a whole number >= 1"):
        check_settings(Oven(minutes=None))


def test_what_nothing_reads_is_named_with_both_ways_out():
    needs = [Need("degrees missing", {"fan": (True,), "minutes": None})]
    assert find_unread(Oven(), needs) == find_unread(Oven(200, fan=True), needs) == ""
    assert find_unread(Oven(200, minutes=9), needs) == find_unread(Oven(200), needs, lambda name: True) == ""
    said = find_unread(Oven(200), needs)
    assert said.startswith("degrees=200 has no effect with fan=False and minutes=30. Remove degrees")
    assert said.endswith("or set fan to True or minutes to another value than 30.")


def test_contradictions_are_said_in_their_order_with_the_values():
    clashes = [
        Clash("fan minutes", lambda c: c.minutes > 60, "it is too long. Set minutes to {c.degrees}."),
        Clash("fan", lambda c: not c.fan, "it is off."),
    ]
    assert list(find_clashes(Oven(minutes=99), clashes)) == [
        "fan=False with minutes=99: it is too long. Set minutes to 180.", "fan=False: it is off."
    ]  # fmt: skip
