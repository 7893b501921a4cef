"""Bundles: every case that users are promised is there, comes out byte for byte, and holds what its name says."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from kdtree import captured, fixtures
from kdtree.bundle import BundleError, load
from kdtree.measure import cases
from kdtree.ref.tree_accept import BAD_LINK, BAD_N_NODES, CYCLE, OK

PROMISED = {
    "tree_build_singlereq": {"B": 1, "D": 7, "K": 4, "budget": 12},
    "tree_build_small_budget": {"B": 5, "D": 7, "K": 4, "budget": 4},
    "tree_build_tiny": {"B": 8, "D": 3, "K": 3, "budget": 5},
    "tree_build_underfull": {"B": 5, "D": 2, "K": 2, "budget": 8},
    "tree_build_wide": {"B": 4, "D": 7, "K": 8, "budget": 32},
    "tree_build_smollm2_code": {"B": 8, "D": 7, "K": 32},
    "tree_build_smollm2_prose": {"B": 8, "D": 7, "K": 32},
    "verify_attn_h16_p2048_b16": {"B": 2, "H": 16, "N": 17, "L": 2048},
    "verify_attn_h64_p128_b32": {"B": 1, "H": 64, "N": 33, "L": 128},
}


def small() -> list[fixtures.Fixture]:
    return [f for f in fixtures.all_fixtures() if not f.large]


@pytest.mark.parametrize("name", PROMISED)
def test_the_promised_cases_have_the_promised_shapes(name):
    params = fixtures.read_manifest()[name]["params"]
    assert params | PROMISED[name] == params


def test_names_are_unique_and_begin_with_their_op():
    names = [f.name for f in fixtures.all_fixtures()]
    assert len(set(names)) == len(names)
    assert all(f.name.startswith(f.op) for f in fixtures.all_fixtures())


def test_committed_bundles_are_made_again_byte_for_byte():
    assert fixtures.regenerate(large=False, check=True) == []


def test_a_large_bundle_is_made_on_demand_and_is_the_pinned_one(tmp_path):
    (tmp_path / fixtures.MANIFEST).write_text((fixtures.ROOT / fixtures.MANIFEST).read_text())
    bundle = fixtures.get("verify_attn_h64_p128_b32", tmp_path)
    assert bundle.inputs["kv"].shape == (1, 164, 576)
    # 128 + 33 rows are in use; what lies behind them is NaN.
    assert np.isfinite(bundle.inputs["kv"][:, :161].astype(np.float32)).all()
    assert np.isnan(bundle.inputs["kv"][:, 161:].astype(np.float32)).all()


def test_the_files_are_those_of_the_manifest():
    for fixture in small():
        entry = fixtures.read_manifest()[fixture.name]
        data = fixtures.path_of(fixture).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
        assert len(data) == entry["bytes"] < 64 * 1024
    assert {p.stem for p in fixtures.ROOT.glob("*.kdtr")} == {f.name for f in small()}


def test_a_bundle_that_was_changed_is_refused(tmp_path):
    (tmp_path / fixtures.MANIFEST).write_text((fixtures.ROOT / fixtures.MANIFEST).read_text())
    data = bytearray((fixtures.ROOT / "topk_tiny.kdtr").read_bytes())
    data[-1] ^= 1
    (tmp_path / "topk_tiny.kdtr").write_bytes(data)
    with pytest.raises(RuntimeError, match="MANIFEST.json pins"):
        fixtures.get("topk_tiny", tmp_path)


def test_a_bundle_of_another_version_is_refused(tmp_path):
    data = (fixtures.ROOT / "topk_tiny.kdtr").read_bytes().replace(b'"kdtr_version":"1"', b'"kdtr_version":"9"')
    (tmp_path / "x.kdtr").write_bytes(data)
    with pytest.raises(BundleError, match="kdtr_version is '9'"):
        load(tmp_path / "x.kdtr")


def test_an_unknown_name_is_refused():
    with pytest.raises(KeyError, match="no fixture is called 'tree_build_huge'"):
        fixtures.by_name("tree_build_huge")


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("tree_accept_full_path", [OK, OK]),
        ("tree_accept_cycle", [CYCLE] * 3),
        ("tree_accept_bad_link", [BAD_LINK] * 3),
        ("tree_accept_n_nodes", [BAD_N_NODES] * 3),
    ],
)
def test_tree_accept_bundles_hold_what_they_are_called(name, statuses):
    assert fixtures.get(name).outputs["status"].tolist() == statuses


def test_the_special_walks_are_special():
    assert fixtures.get("tree_accept_full_path").outputs["n_accepted"].tolist() == [4, 4]
    assert fixtures.get("tree_accept_stop_token").outputs["n_accepted"].tolist()[0] == 2
    assert fixtures.get("tree_accept_no_match").outputs["n_accepted"].tolist() == [0, 0, 0]
    assert fixtures.get("tree_accept_cycle").outputs["n_accepted"].tolist() == [1, 0, 0]
    # Of two siblings with one token the first is taken, although only the second could go on.
    assert fixtures.get("tree_accept_duplicate_siblings").outputs["path"].tolist() == [[0, 1, -1, -1]]


def test_underfull_trees_are_in_it():
    assert (fixtures.get("tree_build_underfull").outputs["n_nodes"] == 7).all()  # 2 + 4 prefixes and the root
    assert fixtures.get("tree_build_nan").outputs["n_nodes"][0] == 1
    assert (fixtures.get("tree_build_no_budget").outputs["n_nodes"] == 1).all()


def test_captured_acceptance_is_that_of_the_capture():
    for corpus in captured.CORPORA:
        _, about = captured.read(corpus)
        assert fixtures.get(f"tree_accept_smollm2_{corpus}").outputs["n_accepted"].tolist() == about["accepted"]
        words = captured.words(corpus)
        tokens = fixtures.get(f"tree_build_smollm2_{corpus}").outputs["token_ids"]
        assert all(int(t) in words for t in tokens.ravel() if t >= 0)


def test_every_small_bundle_is_a_correctness_case():
    listed = {c.name for op in cases.FAMILIES for c in cases.bundle_cases(op, large=False)}
    assert listed == {f.name for f in small()}


def test_the_command_says_what_changed(tmp_path, capsys):
    assert fixtures.main(["--small", "--root", str(tmp_path), "--check"]) == 1 if _manifest(tmp_path) else 0
    assert "differs: topk_tiny" in capsys.readouterr().out


def _manifest(root) -> bool:
    """A manifest that pins another topk_tiny."""
    manifest = json.loads((fixtures.ROOT / fixtures.MANIFEST).read_text())
    manifest["bundles"]["topk_tiny"]["sha256"] = "0" * 64
    (root / fixtures.MANIFEST).write_text(json.dumps(manifest))
    return True
