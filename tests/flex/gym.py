"""Every mask and every mod of attention-gym, made on the default device."""

from __future__ import annotations

import torch
from attn_gym import masks, mods
from attn_gym.masks.document_mask import length_to_offsets
from torch.nn import functional

_TREE = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]


def _offsets(*lengths):
    return length_to_offsets(list(lengths), torch.get_default_device())


def _here(tensor):
    """A tensor that was drawn on the CPU, on the default device."""
    return tensor.to(torch.get_default_device())


def topk():
    """Which three of eight blocks each row of blocks of two batch entries and heads visits."""
    drawn = [torch.randperm(8, generator=torch.Generator().manual_seed(n), device="cpu")[:3] for n in range(2 * 2 * 8)]
    return _here(torch.stack(drawn).view(2, 2, 8, 3))


def _ancestors():
    return masks.build_tree_ancestor_matrix(_TREE, torch.get_default_device())


def _is_global(length):
    return torch.arange(length) % 17 == 3


def _vsa(variable):
    chosen = topk()
    sizes = torch.tensor([8, 8, 5, 8, 3, 8, 8, 2]) if variable else None
    return masks.generate_vsa_mask_mod(chosen, 8, sizes)


MASKS = {  # how it is made, queries, keys
    "causal": (lambda: masks.causal_mask, 100, 100),
    "causal more keys": (lambda: masks.causal_mask, 64, 130),
    "causal fewer keys": (lambda: masks.causal_mask, 130, 64),
    "sliding window": (lambda: masks.generate_sliding_window(17), 130, 130),
    "sliding window of nothing": (lambda: masks.generate_sliding_window(5), 130, 64),
    "dilated": (lambda: masks.generate_dilated_sliding_window(24, 3), 100, 100),
    "document causal": (lambda: masks.generate_doc_mask_mod(masks.causal_mask, _offsets(30, 1, 50, 19)), 100, 100),
    "document window": (
        lambda: masks.generate_doc_mask_mod(masks.generate_sliding_window(6), _offsets(30, 1, 50, 19)), 100, 100,
    ),
    "document packed": (lambda: masks.generate_packed_causal_doc_mask_mod(_offsets(30, 1, 50, 19)), 100, 100),
    "flamingo": (
        lambda: masks.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 20], [20, 64], [50, 90]]), 24),
        100, 72,
    ),
    "global sliding window": (lambda: masks.generate_global_sliding_window(9, _is_global(100)), 100, 100),
    "jetspec tree": (
        lambda: masks.generate_jetspec_tree_causal_mask_mod(50, _ancestors()), 16, 66,
    ),
    "jetspec training": (lambda: masks.generate_jetspec_training_mask_mod(40, 8), 64, 104),
    "natten": (lambda: masks.generate_natten(10, 10, 3, 5), 100, 100),
    "natten tiled": (lambda: masks.generate_tiled_natten(12, 8, 5, 3, 4, 4), 96, 96),
    "natten morton": (lambda: masks.generate_morton_natten(8, 8, 3, 5), 64, 64),
    "prefix lm": (lambda: masks.generate_prefix_lm_mask(37), 100, 100),
    "shared prefix": (
        lambda: masks.generate_shared_prefix_mask_mod(_offsets(30, 20, 25, 10, 15), torch.tensor([0, 0, 0, 3, 3])),
        100, 100,
    ),
    "sta 2d": (lambda: masks.generate_sta_mask_mod_2d((8, 8), (4, 4), (2, 2)), 64, 64),
    "sta 2d text": (lambda: masks.generate_sta_mask_mod_2d((8, 8), (6, 4), (2, 2), 10), 80, 80),
    "sta 3d": (lambda: masks.generate_sta_mask_mod_3d((4, 4, 4), (2, 2, 2), (2, 2, 2)), 64, 64),
    "sta 3d text": (lambda: masks.generate_sta_mask_mod_3d((4, 4, 4), (2, 4, 2), (2, 2, 2), 7), 75, 75),
    "svg spatial": (lambda: masks.generate_spatial_head_mask_mod(10, 6, 16, 1, round_width=8), 106, 106),
    "svg spatial sink": (
        lambda: masks.generate_spatial_head_mask_mod(10, 6, 16, 1, attn_sink=True, round_width=8), 106, 106,
    ),
    "svg temporal": (lambda: masks.generate_temporal_head_mask_mod(10, 6, 16, 2), 106, 106),
    "batchify": (lambda: masks.batchify_mask_mod(masks.causal_mask, 20), 100, 100),
    "batchify window": (lambda: masks.batchify_mask_mod(masks.generate_sliding_window(4), 20), 100, 100),
    "block diffusion": (lambda: masks.generate_block_diffusion_mask(50, 8), 100, 100),
    "vsa": (lambda: _vsa(variable=False), 64, 64),
    "vsa padded": (lambda: _vsa(variable=True), 64, 64),
}  # fmt: skip


def _parameter(*shape):
    return _here(torch.randn(shape, generator=torch.Generator().manual_seed(3), device="cpu")).requires_grad_()


def _graph():
    adjacency = _here(torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(5), device="cpu")) < 0.04
    return adjacency | adjacency.mT


def _spatial():
    bias, distances = _parameter(3, 6), mods.shortest_path_distances(_graph(), 4)
    return mods.generate_graphormer_spatial_bias(bias, distances), [bias]


def _edge():
    graph, bias = _graph(), _parameter(3, 3, 5)
    types = _here(torch.randint(5, graph.shape, generator=torch.Generator().manual_seed(6), device="cpu"))
    return mods.generate_graphormer_edge_bias(bias, *mods.shortest_path_edge_types(graph, types, 3)), [bias]


def _rope():
    query_rope, key_rope = _parameter(2, 3, 64, 4), _parameter(2, 1, 64, 4)
    return mods.generate_mla_rope_score_mod(query_rope, key_rope, 3, 0.3), [query_rope, key_rope]


MODS = {
    "alibi": lambda: (mods.generate_alibi_bias(3), []),
    "graphormer spatial": _spatial,
    "graphormer edge": _edge,
    "mla rope": _rope,
    "sandwich": lambda: (mods.generate_sandwich_bias(3, 64, 32, torch.get_default_device()), []),
    "softcap": lambda: (mods.generate_tanh_softcap(2), []),
    "softcap approx": lambda: (mods.generate_tanh_softcap(2, approx=True), []),
}
MODS |= {
    f"activation {act.__name__}": lambda act=act: (mods.generate_activation_score_mod(act), [])
    for act in (functional.gelu, functional.relu, functional.silu, functional.softplus, functional.mish, torch.sigmoid)
}
