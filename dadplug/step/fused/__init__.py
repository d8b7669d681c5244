"""Optimizer steps on gradients that are products of factors, and are never formed as a whole."""
