"""Helion kernels, lowered to Triton. Importing this package imports neither; :mod:`.loader` does, on demand."""
