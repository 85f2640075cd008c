"""The stores of the tiers: device memory, host memory, swap files and checkpoint files."""
