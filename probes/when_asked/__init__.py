"""Modules of PyTorch that a dry run needs nothing of, but that are imported with what it needs: they come when somebody asks something of them."""
