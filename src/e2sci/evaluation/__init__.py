"""Measuring: tasks, methods side by side on emulated devices and links, and what comes of it."""
