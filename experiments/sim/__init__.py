"""Simulated experiments: published results, policies against each other, trace replay."""
