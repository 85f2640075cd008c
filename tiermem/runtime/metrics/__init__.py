"""Measurements: counters, a timeline, the machine's speeds, times of passes.

Decides nothing; reads clocks and events, touches no block.
"""
