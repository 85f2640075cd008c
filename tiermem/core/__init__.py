"""Decides what goes where and when. Pure: no file, no CUDA call, no clock, no thread."""
