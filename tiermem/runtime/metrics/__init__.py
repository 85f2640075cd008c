"""What happened, and how long it took: counters, a timeline, the machine's speeds, times of passes.

Decides nothing; reads clocks and events, touches no block.
"""
