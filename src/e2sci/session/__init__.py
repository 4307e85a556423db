"""The protocol as state machines without I/O, clock or model: `messages`, `edge`, `cloud`."""
