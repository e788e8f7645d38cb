"""The settings of a candidate: one row each, from which every list of settings is derived."""
