"""Measurements: counters, a timeline, the machine's speeds, times of passes.

Makes no decisions; reads clocks and events, uses no blocks.
"""
