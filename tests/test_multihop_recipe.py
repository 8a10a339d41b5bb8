"""recipes/multihop_qa: the loaders on files in the schemas of the public sets, and the configurations."""

import json
import runpy
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from agent_r1_trl import SearchQAEnv
from agent_r1_trl.cli import main
from agent_r1_trl.cli.train import read_arguments
from tests.effort import short

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "multihop_qa"
CONFIGS = sorted(RECIPE.glob("*/config_*.yaml"))
ALGORITHMS = ("grpo", "ppo", "reinforce_pp", "rloo")
make_data = runpy.run_path(str(RECIPE / "make_data.py"))

FACTS = {"title": ["Café Müller", "Pina Bausch", "Café Müller"], "sent_id": [0, 1, 2]}
CONTEXT = {"title": ["Café Müller", "Pina Bausch"], "sentences": [["A dance."], ["Born 1940."]]}
PARAGRAPHS = [
    {"idx": 0, "title": "Noise", "paragraph_text": "...", "is_supporting": False},
    {"idx": 1, "title": "Café Müller", "paragraph_text": "A dance.", "is_supporting": True},
    {"idx": 2, "title": "Pina Bausch", "paragraph_text": "Born 1940.", "is_supporting": True},
]
STEPS = [
    {"id": 1, "question": "Café Müller >> choreographer", "answer": "Pina Bausch", "paragraph_support_idx": 1},
    {"id": 2, "question": "When was #1 born?", "answer": "1940", "paragraph_support_idx": 2},
]
QUESTION = "When was the choreographer of Café Müller born?"
TITLES = [{"title": "Café Müller"}, {"title": "Pina Bausch"}]

# set -> (a row as it is published, the evidence that it gives)
PUBLISHED = {
    "hotpotqa": (
        {
            "id": "train_0",
            "question": QUESTION,
            "golden_answers": ["1940"],
            "metadata": {"type": "bridge", "level": "medium", "supporting_facts": FACTS, "context": CONTEXT},
        },
        TITLES,
    ),
    "2wikimultihopqa": (
        {
            "id": "train_0",
            "question": QUESTION,
            "golden_answers": ["1940"],
            "metadata": {
                "type": "compositional",
                "supporting_facts": FACTS,
                "context": CONTEXT,
                "evidences": ["a fact"],
            },
        },
        TITLES,
    ),
    "musique": (
        {
            "id": "2hop__1_2",
            "question": QUESTION,
            "golden_answers": ["1940", "27 July 1940"],
            "metadata": {"paragraphs": PARAGRAPHS, "question_decomposition": STEPS},
        },
        TITLES,
    ),
    "nq": ({"id": "train_0", "question": QUESTION, "golden_answers": ["1940"]}, []),
}


def write(path, rows):
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def make(tmp_path, monkeypatch, capsys):
    """Runs make_data.py on rows of a set; returns (code, rows, manifest, what was said)."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def make(name, rows, *options, suffix="jsonl"):
        from agent_r1_trl.cli.errors import run_command

        path = write(tmp_path / f"{name}.{suffix}", rows)
        arguments = ["--sets", name, "--split", "train", "--data_files", path, "--output", str(tmp_path / "out")]
        code = run_command(make_data["run"], [*arguments, *options])
        said = capsys.readouterr()
        if code:
            return code, [], {}, said.err
        written = [
            json.loads(line) for line in (tmp_path / "out/train.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        return code, written, json.loads((tmp_path / "out/train.json").read_text(encoding="utf-8")), said.out

    return make


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_set_becomes_rows_that_the_environment_starts_on(name, suffix, make):
    published, evidence = PUBLISHED[name]
    code, (row,), about, _ = make(name, [published], suffix=suffix)
    identifier = published["id"]
    assert code == 0 and (row["id"], row["question"], row["source"]) == (f"{name}/{identifier}", QUESTION, name)
    assert row["answers"] == (["1940", "27 July 1940"] if "musique" in name else ["1940"])
    assert row["evidence"] == evidence
    assert about["sets"][name]["with_evidence"] == bool(evidence)

    class Nothing:
        def search(self, query, k=3):
            return []

    env = SearchQAEnv(Nothing())
    assert env.reset(row)[-1]["content"] == QUESTION and env.golds == row["answers"]
    assert len(env._evidence) == len(evidence)


@pytest.mark.parametrize("missing", ["id", "question", "golden_answers"])
def test_a_missing_column_is_named_with_the_set_and_the_row(missing, make):
    row = {key: value for key, value in PUBLISHED["hotpotqa"][0].items() if key != missing}
    code, _, _, said = make("hotpotqa", [row])
    assert code == 2 and f"hotpotqa, row 0: there is no column '{missing}'" in said


@pytest.mark.parametrize(
    ("golds", "answers"),
    [
        (["a", "b", "a", " a "], ["a", "b"]),
        ("Caf\u0065\u0301 &amp; bar", ["Café & bar"]),
        ([1940], ["1940"]),
    ],
)
def test_gold_answers_are_texts_or_numbers_in_one_spelling(golds, answers):
    assert make_data["read_answers"](golds) == answers


def test_a_gold_of_another_form_is_refused_by_name(make):
    for golds in ([{"value": "a"}], [True]):
        code, _, _, said = make("nq", [{**PUBLISHED["nq"][0], "golden_answers": golds}])
        assert code == 2 and "nq, row 0: column 'golden_answers'" in said


def test_questions_without_an_answer_are_excluded_and_counted(make):
    good = PUBLISHED["nq"][0]
    rows = [good, {**good, "id": "empty", "golden_answers": []}, {**good, "id": "blank", "question": " "}]
    code, kept, about, said = make("nq", rows)
    assert code == 0 and [row["id"] for row in kept] == ["nq/train_0"]
    assert about["sets"]["nq"]["left_out"] == {"without answers": 1, "without question": 1} and "left out" in said
    code, _, _, said = make("nq", rows[1:2])
    assert code == 2 and "no row is left" in said and "without answers" in said


def test_an_id_that_occurs_twice_and_a_strange_fact_are_named(make):
    code, _, _, said = make("nq", [PUBLISHED["nq"][0]] * 2)
    assert code == 2 and "nq, row 1: id 'train_0' occurs twice" in said
    row = {**PUBLISHED["hotpotqa"][0], "metadata": {"supporting_facts": [{"page": "x"}]}}
    code, _, _, said = make("hotpotqa", [row])
    assert code == 2 and "hotpotqa, row 0: column 'metadata'" in said


def test_a_draw_depends_on_the_seed_alone_and_its_ids_are_hashed(make):
    rows = [{**PUBLISHED["nq"][0], "id": f"train_{n}"} for n in range(50)]
    draws = [make("nq", rows, "--num", "10", "--seed", seed)[1:3] for seed in ("0", "0", "1")]
    (first, about), (again, about_again), (other, about_other) = draws
    assert first == again and about == about_again and len(first) == 10
    assert {row["id"] for row in first} != {row["id"] for row in other}
    assert about["sha256_of_ids"] == make_data["hash_of"](first) != about_other["sha256_of_ids"]


def test_mistakes_on_the_command_line_are_named(make, tmp_path):
    assert "--num 0" in make("nq", [PUBLISHED["nq"][0]], "--num", "0")[3]
    code, _, _, said = make("nq", [PUBLISHED["nq"][0]], "--sets", "nq", "musique")
    assert code == 2 and "--data_files: are files of one set" in said
    code, _, _, said = make("nq", [PUBLISHED["nq"][0]], "--data_files", str(tmp_path / "missing.jsonl"))
    assert code == 2 and "missing.jsonl" in said and "cannot be read" in said


# -------------------------------------------------------------------- the configurations


def test_there_is_a_configuration_for_every_algorithm_and_size():
    assert [str(path.relative_to(RECIPE)) for path in CONFIGS] == [
        f"{algorithm}/config_{size}.yaml" for algorithm in ALGORITHMS for size in ("1.5b", "3b", "cpu", "cpu_smollm2")
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_configuration_says_what_agent_r1_released(path):
    algorithm, recipe = path.parent.name, yaml.safe_load(path.read_text(encoding="utf-8"))
    on_this_machine = ["--config", str(path), "--bf16", "false", "--use_cpu", "true", "--use_vllm", "false"]
    _, args, model = read_arguments(on_this_machine)
    estimator = {"ppo": "gae"}.get(algorithm, algorithm)
    assert args.advantage_estimator == estimator and recipe["env_kwargs"]["outcome"] == "strict"
    if path.stem.startswith("config_cpu"):
        return
    size = path.stem.removeprefix("config_").upper()
    assert model.model_name_or_path == f"Qwen/Qwen2.5-{size}-Instruct"
    assert (recipe["env_kwargs"]["top_k"], args.max_turns, args.max_tokens_per_turn) == (5, 5, 1024)
    assert (args.max_completion_length, args.learning_rate, args.beta, args.epsilon) == (8192, 1e-6, 0.001, 0.2)
    shape = args.rollout_shape
    assert (shape.prompts_per_rollout, shape.updates_per_rollout) == (128, 2)
    assert shape.responses_per_prompt == (5 if algorithm in ("grpo", "rloo") else 1)
    assert args.kl_placement == ("reward" if algorithm in ("ppo", "reinforce_pp") else "loss")
    if algorithm == "ppo":
        assert (args.gamma, args.lam, args.critic_learning_rate, args.critic_warmup_steps) == (1.0, 1.0, 1e-5, 5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", short(ALGORITHMS, "ppo"))
def test_the_cpu_configuration_trains(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path / "cache"))
    config = f"recipes/multihop_qa/{algorithm}/config_cpu.yaml"
    group = "4" if algorithm in ("grpo", "rloo") else "1"
    small = ["--max_steps", "1", "--per_device_train_batch_size", "8", "--num_generations", group]
    assert main(["train", "--config", config, "--output_dir", str(tmp_path / "run"), *small]) == 0
    (recorded,) = (tmp_path / "run" / "trajectories").glob("step_000001.jsonl")
    trajectories = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    assert len(trajectories) == 8
