"""patch_sdpa: what it replaces, for how long, and that nobody notices but by the kernels."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import torch_bwattn
from torch_bwattn.testing import Results, judge, oracle, pt_reference

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _restored():
    torch_bwattn.reset_call_counts()
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


def calls() -> int:
    return sum(torch_bwattn.call_counts().values())


def tensors(rows=9, columns=11, heads=(4, 4), dtype=torch.float32):
    query = torch.randn(2, heads[0], rows, 8, dtype=dtype)
    key, value = (torch.randn(2, heads[1], columns, 8, dtype=dtype) for _ in range(2))
    return query, key, value


def judged(out, *args, **kwargs):
    judge(Results(out), oracle(*args, **kwargs), pt_reference(*args, **kwargs))[0].check()


class TestScope:
    def test_context(self):
        args = tensors()
        with torch_bwattn.patch_sdpa():
            assert F.scaled_dot_product_attention is not ORIGINAL
            assert torch.nn.functional.scaled_dot_product_attention is F.scaled_dot_product_attention
            judged(F.scaled_dot_product_attention(*args), *args)
            assert calls() == 1
        assert F.scaled_dot_product_attention is ORIGINAL
        F.scaled_dot_product_attention(*args)
        assert calls() == 1

    def test_nested(self):
        args = tensors()
        with torch_bwattn.patch_sdpa():
            with torch_bwattn.patch_sdpa():
                F.scaled_dot_product_attention(*args)
            assert F.scaled_dot_product_attention is not ORIGINAL
            F.scaled_dot_product_attention(*args)
        assert calls() == 2

    def test_one_object_entered_again(self):
        patch, args = torch_bwattn.patch_sdpa(), tensors()
        with patch:
            with patch:
                F.scaled_dot_product_attention(*args)
            F.scaled_dot_product_attention(*args)
        with patch:
            F.scaled_dot_product_attention(*args)
        assert calls() == 3

    def test_exceptions_leave_it_restored(self):
        with pytest.raises(ZeroDivisionError), torch_bwattn.patch_sdpa():
            raise ZeroDivisionError

    def test_decorator(self):
        @torch_bwattn.patch_sdpa()
        def attend(depth):
            """Doc."""
            if depth:
                attend(depth - 1)
            return F.scaled_dot_product_attention(*args)

        args = tensors()
        judged(attend(2), *args)
        assert calls() == 3
        assert attend.__name__ == "attend"
        assert attend.__doc__ == "Doc."

    def test_install_and_remove(self):
        args, patch = tensors(), torch_bwattn.patch_sdpa()
        patch.install()
        try:
            F.scaled_dot_product_attention(*args)
            with torch_bwattn.patch_sdpa():
                F.scaled_dot_product_attention(*args)
            assert F.scaled_dot_product_attention is not ORIGINAL
        finally:
            patch.remove()
        assert calls() == 2

    def test_overlapping_scopes(self):
        first, second, args = torch_bwattn.patch_sdpa(), torch_bwattn.patch_sdpa(), tensors()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        F.scaled_dot_product_attention(*args)
        assert calls() == 1
        second.__exit__(None, None, None)

    def test_threads(self):
        args = tensors()
        expected = torch_bwattn.sdpa(*args)
        start = threading.Barrier(4)

        def work(_):
            start.wait()
            for _ in range(60):
                with torch_bwattn.patch_sdpa():
                    assert torch.equal(F.scaled_dot_product_attention(*args), expected)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert calls() >= 240

    def test_another_threads_exit_does_not_end_mine(self):
        args = tensors()
        entered, leave = threading.Event(), threading.Event()

        def other():
            with torch_bwattn.patch_sdpa():
                entered.set()
                leave.wait()

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        with torch_bwattn.patch_sdpa():
            leave.set()
            thread.join()
            F.scaled_dot_product_attention(*args)
            assert calls() == 1


class TestCalls:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_every_argument(self, dtype):
        query, key, value = tensors(heads=(4, 2), dtype=dtype)
        mask = torch.randn(9, 11, dtype=dtype)
        with torch_bwattn.patch_sdpa():
            out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale=0.3, enable_gqa=True)
            named = F.scaled_dot_product_attention(
                query=query,
                key=key,
                value=value,
                attn_mask=mask,
                dropout_p=0.0,
                is_causal=False,
                scale=0.3,
                enable_gqa=True,
            )
        judged(out, query, key, value, mask, scale=0.3, enable_gqa=True)
        assert torch.equal(out, named)

    def test_gradients(self):
        leaves = [tensor.requires_grad_() for tensor in tensors()]
        grad = torch.randn(2, 4, 9, 8)
        with torch_bwattn.patch_sdpa():
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        results = Results(out, None, *torch.autograd.grad(out, leaves, grad))
        options = {"is_causal": True, "grad_out": grad}
        for verdict in judge(results, oracle(*leaves, **options), pt_reference(*leaves, **options)):
            verdict.check()

    @pytest.mark.parametrize("size", [(9, 11), (11, 9), (8, 8), (1, 5), (5, 1)], ids=str)
    @pytest.mark.parametrize("bias", ["lower_right", "upper_left"])
    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_causal_bias(self, bias, size, compiled):
        make = {"lower_right": causal_lower_right, "upper_left": causal_upper_left}[bias]
        leaves = [tensor.requires_grad_() for tensor in tensors(*size)]
        grad = torch.randn(2, 4, size[0], 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own gives NaN where rows see nothing
            mask = make(*size)

        def attend(*leaves):
            return F.scaled_dot_product_attention(*leaves, mask)

        torch._dynamo.reset()
        with torch_bwattn.patch_sdpa():
            out = (torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend)(*leaves)
        results = Results(out, None, *torch.autograd.grad(out, leaves, grad))
        alignment = "bottom_right" if bias == "lower_right" else "top_left"
        options = {"is_causal": True, "causal_alignment": alignment, "grad_out": grad}
        for verdict in judge(results, oracle(*leaves, **options), pt_reference(*leaves, **options)):
            verdict.check()
        assert calls() == 1

    def test_causal_bias_made_inside_a_compiled_function(self):
        args = tensors(5, 9)

        def attend(query, key, value):
            return F.scaled_dot_product_attention(query, key, value, causal_lower_right(query.shape[-2], key.shape[-2]))

        torch._dynamo.reset()
        with torch_bwattn.patch_sdpa():
            out = torch.compile(attend, backend="aot_eager")(*args)
        judged(out, *args, is_causal=True, causal_alignment="bottom_right")

    def test_causal_bias_with_gqa_and_scale(self):
        args = tensors(5, 9, heads=(4, 2))
        with torch_bwattn.patch_sdpa():
            out = F.scaled_dot_product_attention(*args, causal_lower_right(5, 9), scale=0.2, enable_gqa=True)
        judged(out, *args, is_causal=True, causal_alignment="bottom_right", scale=0.2, enable_gqa=True)

    def test_causal_bias_with_is_causal_raises(self):
        args = tensors(5, 9)
        with pytest.raises(ValueError, match="causal"):
            F.scaled_dot_product_attention(*args, causal_lower_right(5, 9), is_causal=True)
        with torch_bwattn.patch_sdpa(), pytest.raises(ValueError, match="causal"):
            F.scaled_dot_product_attention(*args, causal_lower_right(5, 9), is_causal=True)

    def test_causal_bias_of_another_size_raises(self):
        args = tensors(5, 9)
        with torch_bwattn.patch_sdpa(), pytest.raises((ValueError, RuntimeError)):
            F.scaled_dot_product_attention(*args, causal_lower_right(6, 9))

    def test_causal_bias_in_the_functions_own_arguments(self):
        args = tensors(5, 9)
        out = torch_bwattn.sdpa(*args, causal_lower_right(5, 9))
        judged(out, *args, is_causal=True, causal_alignment="bottom_right")

    def test_math_is_honoured(self):
        args = tensors()
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*args, is_causal=True)
            with torch_bwattn.patch_sdpa():
                assert torch.equal(F.scaled_dot_product_attention(*args, is_causal=True), expected)
        assert calls() == 0

    def test_other_kernel_contexts_give_right_values(self):
        args = tensors()
        with torch_bwattn.patch_sdpa(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            judged(F.scaled_dot_product_attention(*args), *args)

    def test_dropout_is_seeded(self):
        args = tensors()
        with torch_bwattn.patch_sdpa():
            torch.manual_seed(3)
            first = F.scaled_dot_product_attention(*args, dropout_p=0.5)
            torch.manual_seed(3)
            assert torch.equal(F.scaled_dot_product_attention(*args, dropout_p=0.5), first)
        assert calls() == 2

    def test_subclasses_see_the_call(self):
        class Logged(torch.Tensor):
            seen: list = []

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                cls.seen.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        query, key, value = tensors()
        with torch_bwattn.patch_sdpa():
            out = F.scaled_dot_product_attention(query.as_subclass(Logged), key, value)
        assert isinstance(out, Logged)
        assert any(getattr(func, "__name__", "") == "scaled_dot_product_attention" for func in Logged.seen)
        judged(out.as_subclass(torch.Tensor), query, key, value)

    def test_nested_tensors_work_as_before(self):
        parts = [torch.randn(length, 4, 8) for length in (3, 5)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        expected = F.scaled_dot_product_attention(nested, nested, nested)
        with torch_bwattn.patch_sdpa():
            found = F.scaled_dot_product_attention(nested, nested, nested)
        for got, want in zip(found.unbind(), expected.unbind(), strict=True):
            torch.testing.assert_close(got, want)


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
        assert calls() > 0

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
