"""Stores the fastest constants that searches found on a device, and exchanges them between machines."""
