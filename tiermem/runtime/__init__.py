"""Joins the table that decides with the mover that copies; knows nothing of modules."""
