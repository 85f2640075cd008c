"""Wrapped modules: moved into the tiers, called there, inspected, and given back.

The only package that changes a user's module.
"""
