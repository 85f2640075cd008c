"""Reads and writes of files, in pieces, by one thread: the file mover and its parts."""
