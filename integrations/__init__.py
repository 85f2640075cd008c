"""Foreign configurations, each read by one thin file; installed as ``tiermem.integrations``.

What is here imports public names of tiermem only.
"""
