"""Choice: which backend runs a problem, and why. See :mod:`torch_bwattn.selection.choose`."""
