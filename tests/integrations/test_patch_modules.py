"""PyTorch's own attention modules under the patch, in training."""

from __future__ import annotations

import pytest
import torch

import torch_bwattn
from tests.support.attend import count


class TestModules:
    @staticmethod
    def both(module, *inputs, **options):
        plain = module(*inputs, **options)
        with torch_bwattn.patch_sdpa():
            patched = module(*inputs, **options)
        plain, patched = (out[0] if isinstance(out, tuple) else out for out in (plain, patched))
        torch.testing.assert_close(patched, plain, atol=2e-5, rtol=2e-5)
        grads = []
        for out in (plain, patched):
            module.zero_grad()
            out.square().sum().backward()
            grads.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
        for got, want in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
        assert count() > 0

    @pytest.mark.parametrize("masked", [False, True])
    def test_multihead_attention(self, masked):
        module = torch.nn.MultiheadAttention(32, 4, batch_first=True).train()
        x = torch.randn(2, 9, 32)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(9) if masked else None
        self.both(module, x, x, x, attn_mask=mask, is_causal=masked, need_weights=False)

    def test_key_padding(self):
        module = torch.nn.MultiheadAttention(32, 4, batch_first=True).train()
        x = torch.randn(2, 9, 32)
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 5:] = True
        self.both(module, x, x, x, key_padding_mask=padding, need_weights=False)

    def test_encoder_layer(self):
        self.both(
            torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(), torch.randn(2, 9, 32)
        )

    def test_decoder_layer(self):
        module = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train()
        self.both(module, torch.randn(2, 7, 32), torch.randn(2, 9, 32))

    def test_transformer(self):
        module = torch.nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True).train()
        self.both(module, torch.randn(2, 7, 32), torch.randn(2, 9, 32))
