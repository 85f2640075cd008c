"""Connects the residency table with the code that copies bytes; does not know modules."""
