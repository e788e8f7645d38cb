"""Options, TRL, accelerate and DeepSpeed files, TRL's objects, saved reports -> JobRequest."""
