"""Files for accelerate, TRL, DeepSpeed, vLLM, SkyPilot and SLURM, all from one candidate."""
