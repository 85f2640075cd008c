"""Test doubles for I/O engines, disks, devices and streams, and the conformance suite of engines."""
