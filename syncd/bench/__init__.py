"""Measuring: `syncd bench` and what it measures over."""
