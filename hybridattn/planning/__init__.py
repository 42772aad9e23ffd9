"""Predictions by short simulations, and the process that plans beside the steps."""
