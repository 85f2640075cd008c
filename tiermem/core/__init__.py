"""Decides which block is where and when. Pure: no file, no CUDA call, no clock, no thread."""
