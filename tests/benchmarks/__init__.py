"""Benchmarks: modelled step times on the simulated device, and real times of this machine's CPU or accelerator."""
