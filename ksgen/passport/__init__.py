"""Records which kernel families have given right results on a device, and which ones launchers may therefore choose."""
