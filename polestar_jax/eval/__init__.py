"""Measuring methods on tasks: accuracy against passes and against time."""
