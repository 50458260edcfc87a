"""What is right and how long it takes: the check against float64, the floor, and whether a time can be trusted."""
