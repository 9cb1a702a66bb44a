"""Helion kernels, lowered to Triton, on Blackwell to CuTe-DSL. Importing this imports none; :mod:`.loader` does."""
