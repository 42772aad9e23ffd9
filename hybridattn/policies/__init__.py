"""Policies: pure decisions over frozen views. No device, no tensor, no clock of their own."""
