"""Measuring this machine: real passes on the `host` device become the tables of its profile."""
