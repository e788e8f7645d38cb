"""GPUs as people write them ("2xA100-40G", "4x8xH100", "local") -> Cluster; the catalogue of GPUs."""
