"""Measurement: the host it ran on, times, roofs, memory, result rows and the regression gate."""
