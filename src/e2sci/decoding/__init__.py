"""The mathematics: distributions, divergences, sampling, acceptance, credit.

Pure functions and small values. Nothing here does I/O, reads a clock or knows a model.
"""
