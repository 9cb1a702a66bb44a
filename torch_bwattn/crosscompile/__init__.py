"""What kernels become on a GPU that is not there. See :mod:`torch_bwattn.crosscompile.lane`."""
