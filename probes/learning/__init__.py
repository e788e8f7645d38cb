"""What a study learns from its probes, and which candidate it asks about next."""
