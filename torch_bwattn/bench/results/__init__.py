"""Measured results, one JSON file per machine; `torch_bwattn.bench.report` makes the README's tables from them."""
