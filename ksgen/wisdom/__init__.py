"""What searches found to be the fastest on a device, and how machines exchange it."""
