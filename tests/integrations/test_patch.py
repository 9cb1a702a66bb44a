"""patch_sdpa: what it replaces, for how long, and that nobody notices but by the kernels."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_bwattn
from tests.support.attend import count, judged, tensors
from torch_bwattn.testing import Results

from .conftest import ORIGINAL


class TestScope:
    def test_context(self):
        args = tensors()
        with torch_bwattn.patch_sdpa():
            assert F.scaled_dot_product_attention is not ORIGINAL
            assert torch.nn.functional.scaled_dot_product_attention is F.scaled_dot_product_attention
            judged(F.scaled_dot_product_attention(*args), *args)
            assert count() == 1
        assert F.scaled_dot_product_attention is ORIGINAL
        F.scaled_dot_product_attention(*args)
        assert count() == 1

    def test_nested(self):
        args = tensors()
        with torch_bwattn.patch_sdpa():
            with torch_bwattn.patch_sdpa():
                F.scaled_dot_product_attention(*args)
            assert F.scaled_dot_product_attention is not ORIGINAL
            F.scaled_dot_product_attention(*args)
        assert count() == 2

    def test_one_object_entered_again(self):
        patch, args = torch_bwattn.patch_sdpa(), tensors()
        with patch:
            with patch:
                F.scaled_dot_product_attention(*args)
            F.scaled_dot_product_attention(*args)
        with patch:
            F.scaled_dot_product_attention(*args)
        assert count() == 3

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
        assert count() == 3
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
        assert count() == 2

    def test_overlapping_scopes(self):
        first, second, args = torch_bwattn.patch_sdpa(), torch_bwattn.patch_sdpa(), tensors()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        F.scaled_dot_product_attention(*args)
        assert count() == 1
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
        assert count() >= 240

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
            assert count() == 1


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
        judged(results, *leaves, **options)

    def test_math_is_honoured(self):
        args = tensors()
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*args, is_causal=True)
            with torch_bwattn.patch_sdpa():
                assert torch.equal(F.scaled_dot_product_attention(*args, is_causal=True), expected)
        assert not set(torch_bwattn.call_counts()) & {"aten", "reference", "helion", "cute"}

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
        assert count() == 2

    def test_subclasses_see_the_call(self):
        class Logged(torch.Tensor):
            seen: ClassVar[list] = []

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

    def test_nested_tensors_work_as_before_or_are_refused(self):
        parts = [torch.randn(length, 4, 8) for length in (3, 5)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        expected = F.scaled_dot_product_attention(nested, nested, nested)
        with torch_bwattn.patch_sdpa():
            try:
                found = F.scaled_dot_product_attention(nested, nested, nested)
            except (TypeError, NotImplementedError) as error:
                refusal = str(error)
            else:
                for got, want in zip(found.unbind(), expected.unbind(), strict=True):
                    torch.testing.assert_close(got, want)
                return
        assert "query" in refusal
