"""Safetensors files: which bytes belong to which tensor.

Defines what a valid file, folder and index are. Opens only those files, and only for reading.
"""
