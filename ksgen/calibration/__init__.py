"""Settles on the device itself which families give right results there."""
