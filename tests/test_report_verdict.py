"""What a verdict may and may not claim."""

from __future__ import annotations

import json

import pytest
from test_report_support import RUN, SOURCE, host_info, make_run, row, timed

from kdtree.report import runstate, verdict
from kdtree.report.exit_codes import ExitCode, worst
from kdtree.report.render import believed_rows, refused_rows, render


def judge(rows):
    return verdict.judge(rows, run=RUN, source=SOURCE)


def build(rows, *, notebooks=None, status=runstate.FINISHED, trust=(), **fields):
    state = runstate.new_state(RUN, "nvidia-fake-h200", SOURCE, "quick", host_info())
    books = notebooks or {"00_host": {"status": "completed", "reason": None, "seconds": 1.0}}
    state |= {"notebooks": books, "status": status, "trust": list(trust)}
    return verdict.build(judge(rows), state=state, host=host_info(), **fields)


def test_a_run_in_which_everything_passed_passes():
    found = build([row(seq=1), row("tree_build", seq=2), timed("topk", "numba:simt", {"B": 1, "K": 8}, 5.0, seq=3)])
    assert (found["status"], found["exit_code"], found["reasons"]) == ("passed", 0, [])
    assert found["counts"]["passed"] == 3
    assert verdict.score(found) == "3 of 3 results passed"


def test_a_wrong_result_fails_and_is_named():
    found = build([row(seq=1), row("verify_attn", case={"B": 2}, status="failed", reason="off by 7", seq=2)])
    assert (found["status"], found["exit_name"]) == ("failed", "WRONG_RESULT")
    assert [(f["op"], f["case"], f["reason"]) for f in found["failures"]] == [("verify_attn", "B=2", "off by 7")]
    assert "1 passed, 1 wrong" in verdict.score(found)


def test_no_row_at_all_fails():
    found = build([])
    assert (found["status"], found["exit_name"]) == ("failed", "WRONG_RESULT")
    assert "nothing passed" in found["reasons"][0]


def test_skipped_alone_is_no_pass():
    assert build([row(status="skipped", reason="does not fit")])["status"] == "failed"


def test_an_op_without_a_pass_although_its_notebook_ran_fails():
    done = {"status": "completed", "reason": None, "seconds": 1.0}
    found = build([row("topk")], notebooks={"10_tree_build": done})
    assert found["status"] == "failed"
    assert "tree_build" in found["reasons"][0]


def test_stale_rows_are_listed_and_not_counted():
    found = build(
        [
            row(seq=1),
            row("kv_compact", source="f" * 12, seq=2),
            row("tree_accept", run="2026-11-01-0000000", seq=3),
        ]
    )
    assert found["counts"]["passed"] == 1
    assert found["counts"]["stale"] == 2
    assert {r["op"] for r in found["stale"]} == {"kv_compact", "tree_accept"}


def test_stale_rows_alone_fail():
    assert build([row(source="f" * 12)])["status"] == "failed"


def test_a_stale_row_that_was_measured_again_is_no_longer_listed():
    found = build([row(source="f" * 12), row()])
    assert (found["counts"]["stale"], found["counts"]["passed"]) == (0, 1)


def test_the_last_row_of_a_key_counts():
    assert build([row(status="failed", seq=1), row(seq=2, pid=101)])["status"] == "passed"
    assert build([row(seq=1), row(status="failed", seq=2)])["status"] == "failed"


@pytest.mark.parametrize(
    "reason",
    ["died: signal 9", "timeout after 60 s", "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access"],
)
def test_nothing_after_a_fault_in_its_process_is_believed(reason):
    rows = [
        row(case={"B": 1}, seq=0),
        row(case={"B": 2}, seq=1, status="error", reason=reason),
        row(case={"B": 3}, seq=2),
        row("tree_build", case={"B": 3}, pid=200, seq=0),
    ]
    found = build(rows)
    assert found["exit_name"] == "DIED"
    assert found["counts"]["passed"] == 2  # the one before, and the one of another process
    assert [r["case"] for r in found["not_believed"]] == ["B=3"]
    assert "1 not believed" in verdict.score(found)


def test_an_older_pass_does_not_stand_in_for_a_result_after_a_fault():
    rows = [
        row(case={"B": 3}, seq=0),
        row(case={"B": 2}, seq=1, status="error", reason="died"),
        row(case={"B": 3}, seq=2),
    ]
    assert build(rows)["counts"]["passed"] == 0


def test_a_pid_used_again_starts_clean():
    rows = [
        row(case={"B": 1}, seq=4, status="error", reason="died: signal 9"),
        row(case={"B": 1}, seq=0, pid=100),  # same pid, its sequence begins anew
        row(case={"B": 2}, seq=1, pid=100),
    ]
    found = build(rows)
    assert (found["status"], found["counts"]["passed"]) == ("passed", 2)


def test_a_pid_used_again_in_a_later_session_starts_clean():
    rows = [
        row(case={"B": 1}, seq=2, status="error", reason="died"),
        row(case={"B": 1}, seq=2),
        row(case={"B": 2}, seq=3),
    ]
    assert len(judge(rows).after_fault) == 2
    later = verdict.judge(rows, run=RUN, source=SOURCE, sessions=[0, 1])
    assert (len(later.after_fault), len(later.believed)) == (0, 2)


def test_rows_without_a_pid_are_held_to_their_op():
    rows = [
        row(status="error", reason="died", pid=None, seq=None),
        row(case={"B": 9}, pid=None, seq=None),
        row("topk", case={"B": 7}),
    ]
    found = build(rows + [row("tree_build", pid=None, seq=None)])
    assert {r["case"] for r in found["not_believed"]} == {"B=9"}


def test_two_families_that_died_are_both_failures_of_one_parent():
    rows = [
        row(op, status="error", reason="died: signal 11", pid=1, seq=i) for i, op in enumerate(("topk", "tree_build"))
    ]
    assert len(build(rows)["failures"]) == 2


def test_peers_are_not_counted_but_their_faults_are_loud():
    wrong = row(impl="peer:torch", status="failed", seq=1, pid=7)
    found = build([row(), wrong])
    assert (found["status"], found["peers"]["failed"]) == ("passed", 1)
    fault = row(impl="peer:torch", status="error", reason="died: signal 11", seq=1, pid=7)
    assert build([row(), fault])["exit_name"] == "DIED"


def test_a_notebook_that_did_not_end_fails_the_run():
    books = {"20_verify_attn": {"status": "failed", "reason": "its kernel died", "seconds": 3.0}}
    found = build([row()], notebooks=books)
    assert (found["status"], found["exit_name"]) == ("failed", "DIED")
    assert "20_verify_attn" in found["reasons"][0]
    assert "the rest unknown" in verdict.score(found)


def test_a_notebook_that_asserts_speaks_of_results():
    books = {"20_verify_attn": {"status": "failed", "reason": "cell [9] raised AssertionError: off by 7"}}
    found = build([row(), row("verify_attn", status="failed")], notebooks=books)
    assert (found["status"], found["exit_name"]) == ("failed", "WRONG_RESULT")
    books["30_tree_accept"] = {"status": "failed", "reason": "its kernel died"}
    assert build([row()], notebooks=books)["exit_name"] == "DIED"


def test_an_interrupted_run_fails():
    assert build([row()], status=runstate.INTERRUPTED)["exit_name"] == "DIED"


def test_slower_and_untrusted_only_change_the_exit_code():
    assert build([row()], baseline={"slower": 2})["exit_name"] == "SLOWER"
    assert build([row()], trust=["a busy GPU"])["exit_name"] == "OK"
    found = build([row()], trust=["a busy GPU"], fail_untrusted=True)
    assert (found["exit_name"], found["status"], found["trust"]["ok"]) == ("UNTRUSTED", "passed", False)
    both = build([row(status="failed")], baseline={"slower": 1}, trust=["x"], fail_untrusted=True)
    assert both["exit_name"] == "WRONG_RESULT"


def test_worst_keeps_the_order_of_the_exit_codes():
    order = [ExitCode.DIED, ExitCode.WRONG_RESULT, ExitCode.SLOWER, ExitCode.UNTRUSTED, ExitCode.OK]
    assert worst([]) is ExitCode.OK
    assert [worst(order[i:]) for i in range(5)] == order


def test_the_file_is_strict_json_and_says_what_the_design_says(tmp_path):
    run_dir = make_run(tmp_path, [row(), row("kv_compact", status="failed", seq=1)])
    render(run_dir)
    text = (run_dir / "verdict.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in verdict.json"))
    assert {"status", "counts", "simulated", "trust", "exit_code", "commit", "run", "host"} <= set(found)
    assert found["status"] == "failed"
    assert found["exit_code"] == 1


def test_a_row_that_is_not_valid_fails_the_run_and_a_torn_one_does_not(tmp_path):
    run_dir = make_run(tmp_path, [row()])
    path = run_dir / "results.jsonl"
    with open(path, "a") as file:
        file.write('{"op": "topk", "impl"')
    assert refused_rows(path) == 0
    assert render(run_dir)["status"] == "passed"
    with open(path, "a") as file:
        file.write("\n" + json.dumps(row(seq=1) | {"rel_l2": float("nan")}) + "\n")
    found = render(run_dir)
    assert (found["status"], found["exit_name"]) == ("failed", "WRONG_RESULT")
    assert len(found["problems"]) == 2


def test_believed_rows_are_those_of_the_verdict(tmp_path):
    run_dir = make_run(tmp_path, [row(), row("kv_compact", source="f" * 12)])
    assert [r["op"] for r in believed_rows(run_dir)] == ["topk"]
