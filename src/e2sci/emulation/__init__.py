"""What stands in for devices, links and time."""
