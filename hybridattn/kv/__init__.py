"""KV cache: block pools (bookkeeping, no torch) and page storage (tensors)."""
