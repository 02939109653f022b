"""Several reports as one table."""

from __future__ import annotations

import json
from typing import Any

from npu_patch import merging


def row(hits: int = 0, op: str = "rms_norm", state: str = "active", **more: Any) -> dict[str, Any]:
    base = {"op": op, "library": "lib", "target": f"lib.m:{op}", "meaning": "", "fallbacks": {}, "reason": ""}
    return {**base, "state": state, "hits": hits, **more}


def report(rank: int | None, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {"pid": 100 + (rank or 0), "local_rank": rank, "world_size": None, "local_world_size": None, "time": 0.0}
    return {"rank": rank, **base, "rows": list(rows), "notes": [], "complete": True, **more}


def waiting(op: str) -> dict[str, Any]:
    return row(op=op, state="waiting", target="other", library="other", reason="not imported")


def test_hits_run_from_minimum_to_maximum_and_fallbacks_are_summed_with_their_ranks() -> None:
    merged = merging.merge(
        [
            report(0, row(13, fallbacks={"dropout": 2})),
            report(1, row(6, fallbacks={"dropout": 1, "window": 4})),
            report(2, row(9)),
        ]
    )
    table = str(merged)
    assert "6-13" in table
    assert "3 x dropout (rank 0, 1)" in table
    assert "4 x window (rank 1)" in table
    assert merged.workers == ("rank 0", "rank 1", "rank 2")
    (data,) = json.loads(merged.to_json())["rows"]
    assert (data["hits_min"], data["hits_max"], data["hits"]) == (6, 13, {"rank 0": 13, "rank 1": 6, "rank 2": 9})
    assert data["fallbacks"] == {"dropout": {"rank 0": 2, "rank 1": 1}, "window": {"rank 1": 4}}


def test_equal_counts_and_reasons_of_all_ranks_are_said_once() -> None:
    table = str(merging.merge([report(rank, row(5, fallbacks={"dropout": 1})) for rank in range(2)]))
    assert "5-5" not in table
    assert "2 x dropout " in table
    assert "(rank" not in table


def test_ranks_that_wrote_nothing_are_named() -> None:
    assert merging.merge([report(0, row(5), world_size=3)]).silent == ("rank 1", "rank 2")
    # Of several nodes only those ranks are expected whose node can write here.
    second_node = report(5, row(5), local_rank=1, world_size=8, local_world_size=4)
    merged = merging.merge([second_node])
    assert merged.silent == ("rank 4", "rank 6", "rank 7")
    assert "wrote no report: rank 4, rank 6, rank 7" in str(merged)


def test_killed_ranks_are_named() -> None:
    merged = merging.merge([report(0, row(5)), report(1, row(3), complete=False)])
    assert [name.partition(" (")[0] for name in merged.unfinished] == ["rank 1"]
    assert "killed before the end" in str(merged)


def test_helpers_without_calls_do_not_clutter() -> None:
    merged = merging.merge([report(0, row(5)), report(0, row(0), pid=7), report(None, row(0), pid=8)])
    assert merged.workers == ("rank 0",)
    assert merged.rows[0].hits == {"rank 0": 5}
    # but where nobody called anything, what they know is all there is
    assert merging.merge([report(None, row(0, state="unrecognised"), pid=8)]).rows[0].state == "unrecognised"


def test_states_that_differ_name_their_ranks() -> None:
    merged = merging.merge([report(0, row(5)), report(1, row(0, state="missing")), report(2, row(5))])
    assert merged.rows[0].state == "active (rank 0, 2)\nmissing (rank 1)"


def test_libraries_that_were_not_imported_are_left_out_where_the_op_was_found_elsewhere() -> None:
    merged = merging.merge([report(0, row(5), waiting("rms_norm"), waiting("rope"))])
    assert [(r.op, r.library) for r in merged.rows] == [("rms_norm", "lib"), ("rope", "other")]


def test_compiled_counts_as_having_run() -> None:
    merged = merging.merge([report(0, row(0, state="compiled"), row(0, op="rope"))])
    assert merged.without_hits(["rms_norm", "rope", "gmm"]) == ["gmm", "rope"]


def test_notes_are_said_once_with_their_ranks() -> None:
    merged = merging.merge([report(0, row(1), notes=["same"]), report(1, row(1), notes=["same", "one"])])
    assert merged.notes == ("same", "one (rank 1)")


def test_nothing_to_merge() -> None:
    assert str(merging.merge([])) == ""
