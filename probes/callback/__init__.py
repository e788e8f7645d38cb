"""`MemoryPlanCallback`, for the user's own runs."""
