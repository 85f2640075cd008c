"""Safetensors files: which bytes belong to which tensor.

Decides what a valid file, folder and index are. Opens those files alone, and only to read.
"""
