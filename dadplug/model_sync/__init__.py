"""Copies of the model kept equal: parameters, buffers, samples, uneven inputs, checks."""
