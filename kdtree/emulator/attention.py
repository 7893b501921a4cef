"""verify_attn's tensor-core kernels, emulated, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtree import inputs
from kdtree.attention import verify_attn
from kdtree.emulator.device import Device
from kdtree.kernels import launch, verify_cluster, verify_mma, verify_wgmma
from kdtree.measure.attention_cases import DAMAGE, DAMAGED
from kdtree.measure.compare import Comparison, compare
from kdtree.spec import K26_SCALE

KERNELS = {"mma": verify_mma, "cluster": verify_cluster, "wgmma": verify_wgmma}

# A case takes some seconds. `sms` makes splits of a prefix, and shares of several items, small enough to run.
BASE: dict[str, Any] = {"B": 2, "H": 8, "N": 9, "L": [0, 100], "dtype": "bfloat16", "page_size": 0, "sms": 4}
CASES: dict[str, list[dict[str, Any]]] = {
    "mma": [
        BASE,
        BASE | {"page_size": 1, "L": [70, 33]},
        BASE | {"B": 1, "L": [150], "sms": 4, "page_size": 16},  # split: joined by a second launch
    ],
    "cluster": [
        BASE | {"B": 1, "L": [1050], "N": 5, "page_size": 64, "sms": 8},  # two rounds, eight blocks a row tile
        BASE | {"page_size": 16, "L": [600, 0], "damage": "page behind the last"},  # four
    ],
    "wgmma": [
        BASE | {"L": [0, 130], "sms": 3},  # ranges that end within a request
        BASE | {"B": 1, "L": [200], "H": 16, "N": 17, "page_size": 64, "sms": 10},  # masks of two tiles
        BASE | {"page_size": 16, "L": [65, 31], "damage": "page behind the last"},
    ],
}


def run(p: dict[str, Any], impl: str, seed: int = 0) -> Comparison:
    """One case. Raises what the emulator finds: `memory.Race`, `memory.BadAccess`, `warp.Deadlock`, RuntimeError."""
    rng = np.random.RandomState(seed)
    ragged = p["B"] > 1
    given = inputs.attention(
        rng,
        batch=p["B"],
        heads=p["H"],
        n_slots=p["N"],
        prefix_lens=p["L"],
        dtype=p["dtype"],
        page_size=p["page_size"],
        ragged=ragged,
    )
    part = p.get("part", "all")
    out, lse = verify_attn(**given, scale=K26_SCALE, kv_lora_rank=512, part=part, backend="ref")
    want = {"out": np.array(out, np.float64), "lse": np.array(lse, np.float64)}
    if p.get("damage"):
        _break(given, want, p["damage"])
    got = _launch(given, p, impl, seed, with_prefix=part == "all")
    return compare(got, want, p["dtype"])


def _break(given: dict[str, Any], want: dict[str, Any], damage: str) -> None:
    name, value = DAMAGE[damage]
    if name == "page_table":
        given["page_table"][DAMAGED, 0] = value
    elif name == "n_nodes":
        given["tree"].n_nodes[DAMAGED] = value
    else:
        given["prefix_lens"][DAMAGED] = value
    # A page that is none spoils the rows that are computed; lengths that do not fit spoil the request.
    rows = slice(int(given["tree"].n_nodes[DAMAGED])) if name == "page_table" else slice(None)
    for array in want.values():
        array[DAMAGED, rows] = np.nan


def _launch(given: dict[str, Any], p: dict[str, Any], impl: str, seed: int, *, with_prefix: bool) -> dict[str, Any]:
    device = Device(p["sms"], seed=seed)
    batch, n_slots, heads = p["B"], p["N"], p["H"]
    kv, table, tree = given["kv"], given["page_table"], given["tree"]
    out = np.full((batch, n_slots, heads, 512), np.nan, kv.dtype)
    lse = np.full((batch, n_slots, heads), np.nan, np.float32)
    shape = {"B": batch, "N": n_slots, "H": heads, "page_size": kv.shape[1], "with_prefix": int(with_prefix)}
    if table is None:
        shape |= {"max_pages": 0, "n_pages": batch, "capacity": kv.shape[1]}
        table = np.zeros(1, np.int32)
    else:
        shape |= {"max_pages": table.shape[1], "n_pages": kv.shape[0], "capacity": table.shape[1] * kv.shape[1]}
    operands = {
        name: device.pointer(np.ascontiguousarray(array), word)
        for name, array, word in (
            ("q", given["q"], "*u16"),
            ("kv", kv, "*u16"),
            ("page_table", table, "*i32"),
            ("prefix_lens", np.asarray(given["prefix_lens"], np.int32), "*i32"),
            ("n_nodes", np.asarray(tree.n_nodes, np.int32), "*i32"),
            ("visibility", np.asarray(tree.visibility), "*u32"),
        )
    }
    outs = {"out": device.pointer(out, "*u16"), "lse": device.pointer(lse, "*f32")}
    with device.installed():
        KERNELS[impl].launch(operands, shape, p["dtype"], K26_SCALE, outs, stream=0, like=None)
    if device.counted is not None and device.counted.any():
        raise RuntimeError("counters are not zero after the launch")
    assert launch.emulated is None
    return {"out": out, "lse": lse}
