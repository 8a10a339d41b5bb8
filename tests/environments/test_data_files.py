"""Rows of a JSONL file: they arrive as they were written, or the column that cannot is named."""

import json

import pytest

from agent_r1_trl.environments.data_files import DataFileError, load_rows


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_dicts_with_different_keys_and_types_arrive_as_they_were_written(tmp_path):
    rows = [
        {"prompt": "a", "state": {"door": 1, "inner": {"x": 1}}, "mixed": [1, "x"]},
        {"prompt": "b", "state": {"door": "open"}, "mixed": [{"a": None}]},
    ]
    assert list(load_rows("dataset_name", write(tmp_path, *rows))) == rows


def test_a_column_that_the_first_row_lacks_is_there(tmp_path):
    rows = load_rows("dataset_name", write(tmp_path, {"id": "a"}, {"id": "b", "level": "easy"}))
    assert list(rows) == [{"id": "a", "level": None}, {"id": "b", "level": "easy"}]


def test_whole_and_other_numbers_are_of_one_type(tmp_path):
    assert [row["x"] for row in load_rows("dataset_name", write(tmp_path, {"x": 1}, {"x": 2.5}))] == [1, 2.5]


@pytest.mark.parametrize("values", [[1, 2.5, "three"], ["a", None, ["b"]], [True, 1]])
def test_a_column_of_several_types_arrives_as_it_was_written(tmp_path, values):
    path = write(tmp_path, *({"good": [1, 2.5], "x": value} for value in values))
    assert [row["x"] for row in load_rows("dataset_name", path)] == values


@pytest.mark.parametrize("values", [[["x"], ["4"], [3]], [{"k": "4"}, {"k": [1]}], [["null"], [{"b": 1}]], ["4", 3]])
def test_a_text_that_would_arrive_as_a_number_is_named(tmp_path, values):
    path = write(tmp_path, *({"good": [1, "x"], "answer": value} for value in values))
    with pytest.raises(DataFileError, match=r"the column 'answer' holds values of several types.*would be read as"):
        load_rows("dataset_name", path)


def test_a_file_that_arrow_cannot_hold_is_named(tmp_path):
    path = write(tmp_path, {"good": 1, "huge": 10**30}, {"good": 2, "huge": 1})
    with pytest.raises(DataFileError, match=r"dataset_name=.*too large.*Give each column one type"):
        load_rows("dataset_name", path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("e.jsonl", ""), ("b.jsonl", "\n\n"), ("e.csv", ""), ("h.csv", "id,answer\n"), ("e.json", ""), ("l.json", "[]")],
)
def test_a_file_without_rows_says_so(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataFileError, match=rf"dataset_name='.*{name}' has no rows"):
        load_rows("dataset_name", str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"nonsense", "cannot be read as parquet.*Pass a data file"),
        ("a.csv", "id,answer\n1,\u00e9\n".encode("latin-1"), "cannot be read as csv.*UTF-8"),
        ("a.jsonl", b'{"id": "\xe9"}\n', "line 1: must be a JSON object in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataFileError, match=f"dataset_name='.*{name}'.*{said}"):
        load_rows("dataset_name", str(tmp_path / name))


def test_a_directory_with_a_card_is_read_again_after_a_change(tmp_path):
    """`datasets` knows such a directory by the card alone, and would train on the older rows."""
    card = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "rows.jsonl"}]}]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    for answer in ("Oslo", "Lima"):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"answer": answer}))
        assert load_rows("dataset_name", str(tmp_path))["answer"] == [answer]


@pytest.mark.parametrize("name", ["rows[v2].csv", "part[1]/rows.csv", "rows*.csv"])
def test_a_file_is_read_by_its_name_though_it_looks_like_a_pattern(tmp_path, name):
    for place, text in {name: "own", "rowsX.csv": "another's", "rowsv.csv": "another's"}.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(f"question\n{text}\n")
    assert list(load_rows("dataset_name", str(tmp_path / name))) == [{"question": "own"}]


@pytest.mark.parametrize("form", ["json", "lines.json", "jsonl", "csv"])
def test_texts_that_look_like_dates_or_like_nothing_stay_texts(tmp_path, form):
    rows = [{"answer": "NA", "day": "2024-05-01"}, {"answer": "None", "day": "2024-05-02"}]
    path = tmp_path / f"rows.{form}"
    if form == "csv":
        path.write_text("answer,day\nNA,2024-05-01\nNone,2024-05-02\n,2024-05-03\n")
        rows.append({"answer": None, "day": "2024-05-03"})
    else:
        path.write_text(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)))
    assert list(load_rows("train_dataset", str(path))) == rows
