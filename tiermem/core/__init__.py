"""Decides which block is in which tier when. Pure: no file, no CUDA call, no clock, no thread."""
