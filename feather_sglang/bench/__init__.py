"""``feather bench``: measurements of single parts beside their peers."""
