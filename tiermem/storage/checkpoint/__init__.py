"""Safetensors files as they lie on the disk: which bytes are which tensor's.

Decides what a valid file, folder and index are. Touches those files alone, and only to read.
"""
