"""Queues, admission and prompts: what the next step may do."""
