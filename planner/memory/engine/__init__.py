"""Memory of a vLLM engine: weights, its profile run, blocks of the KV cache."""
