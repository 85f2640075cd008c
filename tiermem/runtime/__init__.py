"""Connects the residency table with the movers that copy bytes; knows no modules."""
