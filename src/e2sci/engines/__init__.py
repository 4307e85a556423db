"""What runs a model: the port (`base`) and the engines behind it."""
