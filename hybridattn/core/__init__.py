"""Words everybody shares: lanes, work, ops, futures, spans, the device and stages contracts, records, traces."""
