"""Hugging Face's models with ``attn_implementation="flex_attention"``, forward and backward, on the CPU."""

from __future__ import annotations

import pytest
import torch

import torch_bwattn

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 20.0},
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_of_a_model(name):
    from transformers.integrations import flex_attention as integration

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    tokens = torch.randint(128, (2, 40))
    padding = torch.ones(2, 40, dtype=torch.long)
    padding[1, 30:] = 0

    def run(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        result = model(tokens, attention_mask=padding, labels=tokens.masked_fill(padding == 0, -100))
        result.loss.backward()
        return result.logits, [parameter.grad.clone() for parameter in model.parameters()]

    logits, grads = run("eager")
    torch_bwattn.reset_call_counts()
    with torch_bwattn.patch_flex_attention(integration):
        found, found_grads = run("flex_attention")
    assert torch_bwattn.call_counts() == {"reference": 2}
    for number, length in enumerate((40, 30)):
        torch.testing.assert_close(found[number, :length], logits[number, :length], rtol=1e-4, atol=1e-5)
    for one, other in zip(found_grads, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
