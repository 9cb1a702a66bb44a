"""Every mask and every mod of attention-gym."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from .dense import check, operands

pytest.importorskip("attn_gym")

from attn_gym import masks, mods
from attn_gym.masks.document_mask import length_to_offsets

_CPU = "cpu"
_TREE = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]


def _offsets(*lengths):
    return length_to_offsets(list(lengths), _CPU)


def _is_global(length):
    return torch.arange(length) % 17 == 3


def _vsa(variable):
    topk = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(n))[:3] for n in range(2 * 2 * 8)])
    sizes = torch.tensor([8, 8, 5, 8, 3, 8, 8, 2]) if variable else None
    return masks.generate_vsa_mask_mod(topk.view(2, 2, 8, 3), 8, sizes)


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
        lambda: masks.generate_jetspec_tree_causal_mask_mod(50, masks.build_tree_ancestor_matrix(_TREE, _CPU)), 16, 66,
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


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    make, q_len, kv_len = MASKS[name]
    mask = make()
    q_k_v = operands(2, q_len, kv_len)
    heads = (2, 2) if name.startswith("vsa") else (None, None)
    check(q_k_v, block_mask=create_block_mask(mask, *heads, q_len, kv_len, device=_CPU, BLOCK_SIZE=32))


def test_vsa_block_mask():
    topk = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(n))[:3] for n in range(2 * 2 * 8)])
    topk, sizes = topk.view(2, 2, 8, 3), torch.tensor([8, 8, 5, 8, 3, 8, 8, 2])
    i, j = torch.arange(64)[:, None], torch.arange(64)
    listed = (topk[:, :, i // 8] == (j // 8)[:, None]).any(-1)
    check(operands(2, 64), block_mask=masks.create_vsa_block_mask(topk, 8, 8), shown=listed)
    shown = listed & (j % 8 < sizes[j // 8])
    check(operands(2, 64), block_mask=masks.create_vsa_block_mask(topk, 8, 8, sizes), shown=shown)


def test_causal_block_mask_fast():
    for separate in (True, False):
        lists = masks.causal.create_causal_block_mask_fast(2, 2, 100, 100, _CPU, 32, separate)
        check(operands(2, 100), block_mask=lists)


def _parameter(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def _graph():
    adjacency = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(5)) < 0.04
    return adjacency | adjacency.mT


def _spatial():
    bias, distances = _parameter(3, 6), mods.shortest_path_distances(_graph(), 4)
    return mods.generate_graphormer_spatial_bias(bias, distances), [bias]


def _edge():
    graph, bias = _graph(), _parameter(3, 3, 5)
    types = torch.randint(5, graph.shape, generator=torch.Generator().manual_seed(6))
    return mods.generate_graphormer_edge_bias(bias, *mods.shortest_path_edge_types(graph, types, 3)), [bias]


def _rope():
    query_rope, key_rope = _parameter(2, 3, 64, 4), _parameter(2, 1, 64, 4)
    return mods.generate_mla_rope_score_mod(query_rope, key_rope, 3, 0.3), [query_rope, key_rope]


MODS = {
    "alibi": lambda: (mods.generate_alibi_bias(3), []),
    "graphormer spatial": _spatial,
    "graphormer edge": _edge,
    "mla rope": _rope,
    "sandwich": lambda: (mods.generate_sandwich_bias(3, 64, 32), []),
    "softcap": lambda: (mods.generate_tanh_softcap(2), []),
    "softcap approx": lambda: (mods.generate_tanh_softcap(2, approx=True), []),
}
MODS |= {
    f"activation {act.__name__}": lambda act=act: (mods.generate_activation_score_mod(act), [])
    for act in (functional.gelu, functional.relu, functional.silu, functional.softplus, functional.mish, torch.sigmoid)
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_mod(name, masked):
    score_mod, captured = MODS[name]()
    lists = create_block_mask(masks.causal_mask, None, None, 64, 64, device=_CPU, BLOCK_SIZE=16) if masked else None
    check(operands(3, 64), score_mod, lists, captured)


def test_activation_undoes_softmax():
    q, k, v = operands(2, 64)
    score_mod = mods.generate_activation_score_mod(torch.sigmoid)
    from torch_bwattn.flex.attention import flex_attention

    out, lse = flex_attention(q, k, v, score_mod, return_lse=True)
    undone = mods.undo_softmax(out, lse, v.sum(-2, keepdim=True))
    torch.testing.assert_close(undone, torch.sigmoid(q @ k.mT / 8**0.5) @ v, rtol=1e-4, atol=1e-4)
