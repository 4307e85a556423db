"""Sessions on an event loop: transport, the cloud's scheduler, the edge, text."""
