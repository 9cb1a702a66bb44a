"""Backends: the only part of the package that knows kernels. See :mod:`torch_bwattn.backends.base` for the protocol."""
