"""Measurements: shapes, peers, clocks, the JSON they are kept in, and the tables made from it.

``python -m torch_bwattn bench`` is the way in. Measured results ship in ``results/``.
"""
