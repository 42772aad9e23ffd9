"""The control plane: requests, scheduler, layer-wise executor, engine loop, and the LLM facade. No torch in here."""
