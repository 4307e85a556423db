"""What listens on a port."""
