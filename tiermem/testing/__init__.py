"""Test doubles for I/O engines, disks, devices and streams; a conformance suite of engines."""
