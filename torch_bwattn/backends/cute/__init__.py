"""Hand-written CuTe-DSL kernels, how they are compiled and cached, and how a compile is judged without a GPU."""
