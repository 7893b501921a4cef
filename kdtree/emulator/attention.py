"""verify_attn's tensor-core kernels, emulated, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtree.attention import verify_attn
from kdtree.emulator.device import Device
from kdtree.kernels import verify_attn as kernels
from kdtree.measure import attention_cases
from kdtree.measure.compare import Comparison, compare
from kdtree.spec import K26_SCALE

E, C = 576, 512  # widths of a row and of its value part

# A case takes some seconds. `sms` makes splits of a prefix, and shares of several items, small enough to run.
BASE: dict[str, Any] = {"B": 2, "H": 8, "N": 9, "L": [0, 100], "dtype": "bfloat16", "page_size": 0, "sms": 4}
CASES: dict[str, list[dict[str, Any]]] = {
    "mma": [
        BASE,
        BASE | {"page_size": 1, "L": [70, 33]},
        BASE | {"B": 1, "L": [150], "sms": 4, "page_size": 16},  # split: joined by a second launch
    ],
    "cluster": [
        BASE | {"B": 1, "L": [1050], "N": 5, "page_size": 64, "sms": 8},  # three rounds, eight blocks a row tile
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
    # A damaged request has no unused slots, whose zeros would stand among its NaN.
    ragged = p["B"] > 1 and not p.get("damage")
    given = attention_cases.arguments(p | {"ragged": ragged}, np.random.RandomState(seed))
    part = p.get("part", "all")
    out, lse = verify_attn(**given, scale=K26_SCALE, kv_lora_rank=C, part=part, backend="ref")
    want = {"out": np.array(out, np.float64), "lse": np.array(lse, np.float64)}
    if p.get("damage"):
        attention_cases.break_request(given, want, p["damage"])
    return compare(_launch(given, p, impl, seed, with_prefix=part == "all"), want, p["dtype"])


def _launch(given: dict[str, Any], p: dict[str, Any], impl: str, seed: int, *, with_prefix: bool) -> dict[str, Any]:
    device = Device(p["sms"], seed=seed)
    batch, n_slots, heads = p["B"], p["N"], p["H"]
    kv, table, tree = given["kv"], given["page_table"], given["tree"]
    out = np.full((batch, n_slots, heads, C), np.nan, kv.dtype)
    lse = np.full((batch, n_slots, heads), np.nan, np.float32)
    shape = {"B": batch, "N": n_slots, "H": heads, "E": E, "C": C}
    shape |= {"page_size": kv.shape[1], "with_prefix": int(with_prefix)}
    if table is None:
        shape |= {"max_pages": 0, "n_pages": batch, "capacity": kv.shape[1]}
        table = np.zeros(1, np.int32)
    else:
        shape |= {"max_pages": table.shape[1], "n_pages": kv.shape[0], "capacity": table.shape[1] * kv.shape[1]}
    arrays = {
        "q": given["q"],
        "kv": kv,
        "page_table": table,
        "prefix_lens": np.asarray(given["prefix_lens"], np.int32),
        "n_nodes": np.asarray(tree.n_nodes, np.int32),
        "visibility": np.asarray(tree.visibility),
    }
    operands = {name: device.pointer(np.ascontiguousarray(array)) for name, array in arrays.items()}
    outs = {"out": device.pointer(out), "lse": device.pointer(lse)}
    with device.installed():
        kernels.verify_attn(operands, shape, p["dtype"], K26_SCALE, outs, impl=impl, stream=0, like=None)
    if device.counted is not None and device.counted.any():
        raise RuntimeError("counters are not zero after the launch")
    return {"out": out, "lse": lse}
