"""One function for each family of models, from the fields of its config to layers."""
