"""config.json -> ModelShape; the catalogue of models."""
