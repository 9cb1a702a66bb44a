"""Schemas of the ``bwattn`` operators, and the library object that holds their registrations.

Composites are what users call; they validate, autocast, broadcast to 4-D and draw the dropout seed, then call
primitives, which are pure functions of their arguments and so can be traced, saved, recomputed and compared at will:

    sdpa, sdpa_with_lse  ->  sdpa_forward  <->  sdpa_backward
    torch_bwattn.flex_attention  ->  flex_forward  <->  flex_backward

Graphs (``torch.compile``, ``torch.export`` after decomposition, selective checkpointing) show the primitives.
"""

from __future__ import annotations

import torch

NAMESPACE = "bwattn"

_PUBLIC = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
    'float? scale=None, bool enable_gqa=False, str causal_alignment="top_left", int[]? window_size=None, '
    "float? softcap=None, Tensor? sink=None"
)

SCHEMAS = {
    "sdpa": f"({_PUBLIC}) -> Tensor",
    "sdpa_with_lse": f"({_PUBLIC}) -> (Tensor out, Tensor lse)",
    "sdpa_forward": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? rng_state, float dropout_p, "
        "bool is_causal, float scale, str causal_alignment, str? backend=None, int[]? window_size=None, "
        "float? softcap=None, Tensor? sink=None) -> (Tensor out, Tensor lse)"
    ),
    "sdpa_backward": (
        "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor out, "
        "Tensor lse, Tensor? rng_state, float dropout_p, bool is_causal, float scale, str causal_alignment, "
        "bool[5] output_mask, str? backend=None, int[]? window_size=None, float? softcap=None, Tensor? sink=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, Tensor grad_sink)"
    ),
}

_MODS = (
    "str? score_mod, Tensor[] score_captured, SymInt[] score_numbers, str? mask_mod, Tensor[] mask_captured, "
    "SymInt[] mask_numbers, Tensor[] block_lists, SymInt[] block_sizes"
)
SCHEMAS |= {
    "flex_forward": (
        f"(Tensor query, Tensor key, Tensor value, float scale, {_MODS}, bool with_max_scores) "
        "-> (Tensor out, Tensor lse, Tensor max_scores)"
    ),
    "flex_backward": (
        f"(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        f"float scale, {_MODS}, bool[] output_mask, str? backend=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grads_captured)"
    ),
}

library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
