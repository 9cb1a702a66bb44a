"""The parts that Hopper kernels are built from."""
