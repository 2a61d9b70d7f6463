"""Decode batches on file, and reports of their plans, in numbers and drawn in the terminal."""
