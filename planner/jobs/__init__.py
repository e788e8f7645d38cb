"""Job, TRL's defaults, every contradiction between settings (rules.py), libraries' names -> fields (settings.py)."""
