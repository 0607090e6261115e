"""Devices and links: found on this machine, named in a catalog, or calibrated."""
