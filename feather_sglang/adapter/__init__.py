"""Everything that touches SGLang; no other package of feather imports it."""
