"""From a case's arguments to what a bundle stores: flat inputs and the references' outputs."""

from __future__ import annotations

import numpy as np

from kdtree.ref import kv_compact as ref_kv_compact
from kdtree.ref import topk as ref_topk
from kdtree.ref import tree_accept as ref_tree_accept
from kdtree.ref import tree_build as ref_tree_build
from kdtree.ref import verify_attn as ref_verify_attn
from kdtree.tree import DraftTree

# Kept bits of a stored float's mantissa. The last bits of exp and log differ between processors' vector units; cut
# off, they do not change the bytes of a bundle. 2^-20 is 50 times finer than the tightest tolerance.
MANTISSA_BITS = 20


def stable(values: np.ndarray) -> np.ndarray:
    """float32 of `values`, rounded to MANTISSA_BITS bits."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    scaled = np.where(np.isfinite(mantissa), np.round(mantissa * 2.0**MANTISSA_BITS), mantissa)
    return np.ldexp(scaled, exponent - MANTISSA_BITS).astype(np.float32)


def flatten(arguments: dict) -> dict[str, np.ndarray]:
    """Arguments by bundle name: a DraftTree becomes ``tree.<field>``, None is left out."""
    flat: dict[str, np.ndarray] = {}
    for name, value in arguments.items():
        if isinstance(value, DraftTree):
            flat |= {f"{name}.{field}": array for field, array in value.arrays().items()}
        elif value is not None:
            flat[name] = np.asarray(value)
    return flat


def reference(op: str, a: dict, params: dict) -> dict[str, np.ndarray]:
    """Outputs of the reference of `op`, in float64 where they are floats. `a` as the public function takes them."""
    if op == "topk":
        return dict(zip(("log_probs", "token_ids"), ref_topk.topk(a["logits"], params["K"]), strict=True))
    if op == "tree_build":
        tree = ref_tree_build.tree_build(
            a["log_probs"],
            a["token_ids"],
            params["budget"],
            root_tokens=a.get("root_tokens"),
            prefix_lens=a.get("prefix_lens"),
        )
        return tree.arrays()
    if op == "verify_attn":
        result = ref_verify_attn.verify_attn(
            a["q"],
            a["kv"],
            a["tree"],
            prefix_lens=a["prefix_lens"],
            scale=params["scale"],
            page_table=a.get("page_table"),
            part=params.get("part", "all"),
            kv_lora_rank=params["kv_lora_rank"],
        )
        return dict(zip(("out", "lse"), result, strict=True))
    if op == "merge_states":
        result = ref_verify_attn.merge_states(a["out_a"], a["lse_a"], a["out_b"], a["lse_b"])
        return dict(zip(("out", "lse"), result, strict=True))
    if op == "tree_accept":
        names = ("path", "n_accepted", "bonus", "status")
        result = ref_tree_accept.tree_accept(a["tree"], a["predictions"], stop_token=params.get("stop_token"))
        return dict(zip(names, result, strict=True))
    if op == "kv_compact":
        moved = ref_kv_compact.kv_compact(
            a["kv"].copy(),
            a["path"],
            a["n_accepted"],
            n_nodes=a["tree"].n_nodes,
            prefix_lens=a["prefix_lens"],
            page_table=a.get("page_table"),
        )
        return {"kv": moved}
    raise ValueError(f"op: got {op!r}, expected topk, tree_build, verify_attn, merge_states, tree_accept or kv_compact")


def solve(op: str, arguments: dict, params: dict) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(inputs, outputs) of a bundle. Floats computed by exp or log are stored as `stable` float32."""
    outputs = reference(op, arguments, params)
    if op in ("topk", "verify_attn", "merge_states"):
        outputs = {n: stable(v) if v.dtype.kind == "f" else v for n, v in outputs.items()}
    return flatten(arguments), outputs
