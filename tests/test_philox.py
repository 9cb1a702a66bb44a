"""The tests' own Philox, by published vectors: what the package's dropout is compared with must be right itself."""

from __future__ import annotations

import numpy as np
import pytest

from .support.philox import keep_mask, philox_4x32

# The known-answer vectors of Random123.
VECTORS = [
    (10, (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        10,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
    (7, (0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        7,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), VECTORS)
def test_known_answers(rounds, counter, key, expected):
    outputs = philox_4x32(counter, key, rounds)
    assert " ".join(f"{int(output):08x}" for output in outputs) == expected


def test_keep_mask_is_a_function_of_position():
    whole = keep_mask(123456789 << 20, (2, 3, 9, 13), 0.4)
    assert whole.shape == (2, 3, 9, 13)
    assert (keep_mask(123456789 << 20, (2, 3, 5, 7), 0.4) == whole[:, :, :5, :7]).all()
    assert (keep_mask(123456789 << 20, (6, 9, 13), 0.4) == whole.flatten(0, 1)).all()


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_keep_rate(dropout_p):
    kept = keep_mask(7, (4, 256, 256), dropout_p).double().mean().item()
    assert abs(kept - (1 - dropout_p)) < 5 * np.sqrt(dropout_p * (1 - dropout_p) / (4 * 256 * 256))
