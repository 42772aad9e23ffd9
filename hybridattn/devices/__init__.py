"""Concrete devices, found by name through ``hybridattn.devices.open_device``. Choosing one is explicit."""
