"""Look-ahead: the plan of which blocks stay, the prefetches, and the replay of repeated passes.

Begins fetches only if there is room; never evicts a block whose use comes sooner.
"""
