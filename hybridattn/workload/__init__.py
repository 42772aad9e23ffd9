"""What is asked of a run: lengths, arrivals, trace files, sessions, as data."""
