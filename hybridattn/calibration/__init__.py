"""Measuring this machine: real steps on the `host` device become the tables of its profile."""
