"""A document of invented figures, for tests."""

from __future__ import annotations

from typing import Any

from torch_bwattn.bench import document
from torch_bwattn.bench.rows import BACKWARD, FORWARD, select_rows

ENVIRONMENT = {
    "date": "2031-05-06T07:08:09Z",
    "commit": "0" * 40,
    "device": {"name": "NVIDIA Invented", "capability": "9.0"},
    "driver": "580.1",
    "platform": "Linux",
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "helion": "1.5.1", "cudnn": None},
    "variables": {},
}

#: TFLOP/s of each provider, before a little is added per row.
SPEEDS = {"bwattn.helion": 500.0, "cudnn": 600.0, "aten_flash": 350.0, "flex": 450.0}


def row_record(row: Any, direction: str, provider: str, tflops: float) -> dict[str, Any]:
    ms = row.flops(direction) / tflops * 1e-9
    return {
        "direction": direction,
        "shape": row.shape,
        "batch": row.batch,
        "heads": row.heads,
        "kv_heads": row.kv_heads,
        "length": row.length,
        "head_dim": row.head_dim,
        "dtype": row.dtype,
        "causal": row.causal,
        "provider": provider,
        "status": document.OK,
        "ms": ms,
        "p20_ms": ms,
        "p80_ms": ms,
        "laps": 10,
        "spread": 0.0,
        "tflops": tflops,
        "check": {"out": {"error": 0.001, "bound": 0.004, "pt_error": 0.001, "passed": True}},
    }


def made_up_document(shapes: tuple[str, ...] = ("B4H32/32S8192D64", "B4H32/8S4096D128")) -> dict[str, Any]:
    made = document.new(ENVIRONMENT, {"made": "up"})
    for number, row in enumerate(select_rows(shapes)):
        for direction in (FORWARD, BACKWARD):
            for provider, tflops in SPEEDS.items():
                made["rows"].append(row_record(row, direction, provider, tflops + number))
            missing = row_record(row, direction, "fa4", 1.0)
            for name in ("ms", "p20_ms", "p80_ms", "laps", "spread", "tflops", "check"):
                del missing[name]
            made["rows"].append({**missing, "status": document.MISSING, "reason": "not installed"})
    for call in ("no_grad", "grad"):
        for provider, us in (("bwattn.helion", 30.0), ("bwattn.helion.function", 31.0), ("cudnn", 35.5)):
            made["host"].append(
                {
                    "call": call,
                    "shape": "B1H8/8S128D64",
                    "dtype": "bfloat16",
                    "provider": provider,
                    "status": document.OK,
                    "us": us,
                    "p20_us": us - 1,
                    "p80_us": us + 1,
                    "blocks": 10,
                }
            )
    made["memory"].append(
        {
            "shape": "B4H32/32S8192D128",
            "dtype": "bfloat16",
            "causal": False,
            "provider": "bwattn.helion",
            "status": document.OK,
            "extra_bytes": 2**30,
            "bound_bytes": 2**30 + 2**29,
        }
    )
    return made
