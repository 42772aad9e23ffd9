"""Latency, throughput, overlap, shares and memory: pure functions of what a run left behind."""
