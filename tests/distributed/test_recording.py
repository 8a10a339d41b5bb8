"""Whatever rank a row is trained on, its numbers stand beside the trajectory that it belongs to."""

import pytest

from tests.distributed.launch import LAUNCHES
from tests.distributed.recording import CASES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_ranks_record_what_one_process_does(results, launch, case):
    found, expected = results(launch)["recorded"][case], results("one")["recorded"][case]
    assert found["files"] == sorted(
        ["steps.jsonl", *(f"step_000001{rank}{kind}.jsonl" for rank in ("", "_rank1") for kind in ("", ".columns"))]
    )
    assert found["num_logs"] == expected["num_logs"] > 1 and found["steps"].keys() == {1}
    assert found["records"].keys() == expected["records"].keys() and len(found["records"]) >= 12
    assert found["is_explained"] == [True] * 12
    for key, record in found["records"].items():
        assert record["marks"] == expected["records"][key]["marks"], key
        columns = expected["records"][key]["columns"]
        assert record["columns"].keys() == columns.keys(), key
        assert bool(columns) == record["marks"][2] or case == "critic"
        for name, values in columns.items():
            assert record["columns"][name] == pytest.approx(values, rel=2e-3, abs=1e-3), (key, name)
    if case == "resampled":
        groups = {marks[0] for marks in (record["marks"] for record in found["records"].values())}
        assert max(groups) > 2, "some were replaced"
        assert {record["marks"][1] for record in found["records"].values()} == {True, False}
