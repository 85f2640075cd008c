"""Modules: taken into the tiers, called there, looked at, and given back.

The only room that touches a user's module.
"""
