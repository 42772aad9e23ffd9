"""Words everybody shares: lanes, work, ops, tickets, spans, the device and stages contracts, records, traces."""
