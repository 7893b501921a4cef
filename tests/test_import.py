"""`import kdtree` needs NumPy alone, and little time: on a host without GPU, torch or libcuda as on any other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kdtree

HEAVY = ("torch", "numba", "llvmlite", "cuda", "cupy", "safetensors", "ml_dtypes", "matplotlib", "pandas", "papermill")


def in_a_new_process(code: str) -> dict:
    """What `code` leaves in `found`."""
    script = f"import json, sys, time\nfound = {{}}\n{code}\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_loads_neither_numba_nor_torch_nor_the_driver():
    found = in_a_new_process(
        "import kdtree\n"
        "found['modules'] = sorted({m.partition('.')[0] for m in sys.modules})\n"
        "found['libraries'] = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
    )
    assert not set(HEAVY) & set(found["modules"])
    assert "libcuda" not in found["libraries"]


def test_the_reference_runs_without_numba_and_torch():
    found = in_a_new_process(
        "import kdtree, numpy as np\n"
        "lp, ids = kdtree.topk(np.array([[[2.0, 1.0, 0.0]] * 2], np.float32), 2)\n"
        "tree = kdtree.tree_build(lp, ids, 3)\n"
        "out = kdtree.tree_accept(tree, np.zeros((1, 4), np.int32))\n"
        "found['accepted'] = int(out.n_accepted[0])\n"
        "found['modules'] = sorted({m.partition('.')[0] for m in sys.modules})\n"
    )
    assert found["accepted"] == 2
    assert not {"numba", "torch", "cuda"} & set(found["modules"])


def test_importing_takes_under_a_second():
    # The best of five: a loaded machine slows all of them, a slow import slows the best one too.
    code = "t = time.perf_counter()\nimport kdtree\nfound['s'] = time.perf_counter() - t"
    assert min(in_a_new_process(code)["s"] for _ in range(5)) < 1.0


def test_importing_prints_nothing_and_leaves_the_environment_alone():
    found = in_a_new_process(
        "import os\nbefore = dict(os.environ)\nimport kdtree\nfound['same'] = before == dict(os.environ)"
    )
    assert found["same"]


def test_the_public_names_are_those_of_the_contract():
    assert sorted(kdtree.__all__) == sorted(
        ["Accepted", "DraftTree", "__version__", "kv_compact", "merge_states", "topk"]
        + ["tree_accept", "tree_build", "verify_attn"]
    )
    for name in kdtree.__all__:
        assert getattr(kdtree, name) is not None


def test_the_docstring_says_what_the_name_is_not():
    assert "nothing to do with spatial k-d trees" in kdtree.__doc__


@pytest.mark.parametrize(
    "module", ["kdtree.spec", "kdtree.tree", "kdtree.device", "kdtree.ref.verify_attn", "kdtree.native"]
)
def test_what_stands_below_the_kernels_does_not_import_them(module):
    found = in_a_new_process(f"import {module}\nfound['modules'] = sorted(sys.modules)")
    assert not {"numba", "torch", "kdtree.kernels", "kdtree._cuda"} & set(found["modules"])
