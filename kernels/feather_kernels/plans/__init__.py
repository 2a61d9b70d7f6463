"""Decode batches on file, and what a plan does with one: in numbers, and drawn in the terminal."""
