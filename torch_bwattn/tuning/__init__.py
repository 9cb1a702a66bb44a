"""Measuring which tunable is fastest for a problem. See :mod:`torch_bwattn.tuning.tuner`."""
