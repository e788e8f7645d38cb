"""Launch files: everything that runs a candidate, made from the candidate alone."""

from planner.launch.command import launch_command, server_command
from planner.launch.export import export
from planner.launch.files import launch_files

__all__ = ["export", "launch_command", "launch_files", "server_command"]
