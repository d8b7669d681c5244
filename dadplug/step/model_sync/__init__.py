"""Replicas of a model that are kept equal: parameters, buffers, samples, uneven inputs, checks."""
