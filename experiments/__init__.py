"""Hydra apps: the only place that knows hydra and wandb. Start with ``python -m experiments.run +experiment=demo``."""
