"""What comes next: the plan of who stays, the fetches ahead of their use, and passes that repeat.

May begin fetches into room that is there; never costs a sooner use its place.
"""
